"""What is asked of the engine, and how it ends.

    waiting ──> running ──> ended, for exactly one Reason
       ^           │
       └───────────┘  preempted: its blocks went to a request ranked before it

A request never changes. How far it has come is the scheduler's to know; all that anybody else
hears is its tokens, step by step, and one `End`.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import msgspec

from ingot.core.errors import IngotError

MAX_PRIORITY = 100
_TOKENS = 2**32


class Reason(Enum):
    """Why a request ended."""

    STOP = "stop"
    """The model ended it, or a stop string did."""
    LENGTH = "length"
    """It has its `max_tokens`."""
    CANCELLED = "cancelled"
    """Its client left."""
    DEADLINE = "deadline"
    REFUSED = "refused"
    """It can never fit, or too many wait; nothing was computed."""
    FAILED = "failed"
    """The step that computed it broke."""


class End(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The end of a request: told by the scheduler, or to it (stop, cancelled, failed).

    >>> End(7, Reason.STOP)
    End(id=7, reason=<Reason.STOP: 'stop'>)
    """

    id: int
    reason: Reason


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One prompt to go on from.

    >>> Request(id=1, prompt=(5, 6, 7), max_tokens=16).total
    19
    >>> Request(id=1, prompt=(), max_tokens=16)
    Traceback (most recent call last):
    ...
    ingot.core.errors.IngotError: request 1 has an empty prompt
      remedy: give at least one token
    """

    id: int
    """No two requests that live at the same time have the same one."""
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int = 0
    """Lower goes first. Waiting makes up for it: see `Limits.patience`."""
    deadline: float | None = None
    """When it is worth nothing any more, by the scheduler's clock."""
    salt: bytes = b""
    """Requests share cached blocks only with those of the same salt: one for each tenant."""
    adapter: str = ""
    sampling: Any = None
    """The sampler's business; plain data, if the log is to be kept."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise self._error("has an empty prompt", "give at least one token")
        if min(self.prompt) < 0 or max(self.prompt) >= _TOKENS:
            raise self._error("has a token that is none", f"give numbers from 0 to {_TOKENS - 1}")
        if not 1 <= self.max_tokens < _TOKENS:
            raise self._error(f"asks for {self.max_tokens} tokens", "ask for at least one")
        if abs(self.priority) > MAX_PRIORITY:
            remedy = f"give a number from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            raise self._error(f"has priority {self.priority}", remedy)
        if self.deadline is not None and not math.isfinite(self.deadline):
            raise self._error(f"has deadline {self.deadline}", "give a finite time, or None")

    def _error(self, what: str, remedy: str) -> IngotError:
        return IngotError(f"request {self.id} {what}", remedy=remedy)

    @property
    def total(self) -> int:
        """The tokens it has when it ends by length."""
        return len(self.prompt) + self.max_tokens
