"""Requests to the engine, and the reasons for which they finish.

    waiting ──> running ──> finished, for exactly one FinishReason
       ^           │
       └───────────┘  preempted: its blocks went to a request that ranks before it

A request is immutable. The scheduler tracks its progress; callers see the tokens of each step and
one `finish_reason`.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import ClassVar, TypeAlias

import msgspec

from ingot.core.errors import IngotError
from ingot.serving.engine.sampling_params import MAX_TOKEN_ID, SamplingParams

MAX_PRIORITY = 100


class FinishReason(Enum):
    """Why a request finished."""

    STOP = "stop"
    """The model generated a stop token, or the text contains a stop string."""
    LENGTH = "length"
    """`max_tokens` were generated."""
    CANCELLED = "cancelled"
    """The client disconnected or cancelled."""
    DEADLINE = "deadline"
    REJECTED = "rejected"
    """The request exceeds the KV cache, or the queue is full; nothing was computed."""
    FAILED = "failed"
    """The step that computed it raised an exception."""


class Abort(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Finish a request early: its client left, a stop string was found, or its step failed.

    >>> Abort(7, FinishReason.STOP)
    Abort(id=7, reason=<FinishReason.STOP: 'stop'>)
    """

    id: int
    reason: FinishReason


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A prompt to complete.

    >>> Request(id=1, prompt=(5, 6, 7), max_tokens=16).max_len
    19
    >>> Request(id=1, prompt=(), max_tokens=16)
    Traceback (most recent call last):
    ...
    ingot.core.errors.IngotError: request 1: prompt must not be empty
      hint: give at least one token
    """

    id: int
    """Unique among the requests that have not finished."""
    prompt: tuple[int, ...]
    """Token ids."""
    max_tokens: int
    """Maximum number of generated tokens."""
    generated: tuple[int, ...] = ()
    """Tokens that another engine generated before it was lost; the request continues after them.
    They count as generated: for `max_tokens`, penalties and the grammar."""
    priority: int = 0
    """Lower runs first. Waiting compensates for it: see `SchedulerConfig.priority_step_s`."""
    deadline: float | None = None
    """Time, on the scheduler's clock, at which the request is dropped."""
    cache_salt: bytes = b""
    """Requests share cached blocks only with requests of the same salt: one per tenant."""
    max_cached_tokens: int | None = None
    """Most prompt tokens to take from the prefix cache; None for no limit."""
    adapter: str = ""
    """Name of a LoRA adapter; empty for the base model."""
    sampling_params: SamplingParams = SamplingParams()
    """Opaque to the scheduler."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise self._error("prompt must not be empty", "give at least one token")
        if min(self.prompt) < 0 or max(self.prompt) > MAX_TOKEN_ID:
            raise self._error("token id out of range", f"give numbers from 0 to {MAX_TOKEN_ID}")
        if not 1 <= self.max_tokens <= MAX_TOKEN_ID:
            raise self._error(f"max_tokens must be at least 1, got {self.max_tokens}", "raise it")
        if self.generated:
            self._check_generated()
        if abs(self.priority) > MAX_PRIORITY:
            hint = f"give a number from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            raise self._error(f"priority out of range, got {self.priority}", hint)
        if self.deadline is not None and not math.isfinite(self.deadline):
            hint = "give a finite time, or None"
            raise self._error(f"deadline must be finite, got {self.deadline}", hint)

    def _check_generated(self) -> None:
        generated, stop_token_ids = self.generated, self.sampling_params.stop_token_ids
        if min(generated) < 0 or max(generated) > MAX_TOKEN_ID:
            hint = f"give numbers from 0 to {MAX_TOKEN_ID}"
            raise self._error("generated: token id out of range", hint)
        is_finished = len(generated) >= self.max_tokens
        if is_finished or not set(generated).isdisjoint(stop_token_ids):
            raise self._error(
                f"generated: a request with these {len(generated)} tokens has finished",
                "give fewer than max_tokens, and no stop token",
            )

    def _error(self, message: str, hint: str) -> IngotError:
        return IngotError(f"request {self.id}: {message}", hint=hint)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens to compute before the first new one: the prompt, and those generated before.

        >>> Request(id=1, prompt=(5, 6), max_tokens=16, generated=(7,)).tokens
        (5, 6, 7)
        """
        return self.prompt + self.generated

    @property
    def num_tokens(self) -> int:
        """Number of `tokens`."""
        return len(self.prompt) + len(self.generated)

    @property
    def max_len(self) -> int:
        """Number of tokens, prompt included, at which it finishes with `LENGTH`."""
        return len(self.prompt) + self.max_tokens


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Named tensors for a model that keeps no state.

    >>> InferenceRequest(id=1, rows=2, inputs=(bytes(16),)).deadline is None
    True
    """

    id: int
    """Unique among the requests that have not finished."""
    rows: int
    """First dimension of all inputs."""
    inputs: tuple[bytes, ...]
    """Little-endian elements of each input of the signature, in its order."""
    deadline: float | None = None
    """Time, on the engine's clock, at which the request is dropped."""
    adapter: ClassVar[str] = ""
    generated: ClassVar[tuple[int, ...]] = ()

    @property
    def num_tokens(self) -> int:
        """The rows: what a router counts as its load."""
        return self.rows


AnyRequest: TypeAlias = Request | InferenceRequest
