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
from typing import Literal

import msgspec

from ingot.core.errors import IngotError

MAX_PRIORITY = 100
MAX_GRAMMAR = 2**16
MAX_BIAS = 1024
MAX_ENDS = 128
MAX_LOGPROBS = 20
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


class Grammar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the text has to be: of a JSON schema, of a regular expression, of a grammar (Lark).

    >>> Grammar(kind="regex", text="yes|no").kind
    'regex'
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str

    def __post_init__(self) -> None:
        if not 1 <= len(self.text) <= MAX_GRAMMAR:
            raise IngotError(
                f"a grammar of {len(self.text):,} characters",
                hint=f"give one of at most {MAX_GRAMMAR:,}",
            )


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are drawn, what ends them and what is told of them.

    The random number of a draw is a function of the seed and the token's position alone.

    >>> Options(temperature=0.0, ends=(2,)).seed
    0
    >>> Options(top_p=float("nan"))
    Traceback (most recent call last):
    ...
    ingot.core.errors.IngotError: top_p is nan
      hint: give a number from 0 to 1
    """

    temperature: float = 1.0
    """At 0 the likeliest token is taken."""
    top_k: int | None = None
    """Only so many of the likeliest tokens; None for all."""
    top_p: float = 1.0
    """Only the likeliest tokens that have this probability together."""
    min_p: float = 0.0
    """Only tokens at least this likely, relative to the likeliest."""
    seed: int = 0
    presence_penalty: float = 0.0
    """Taken off the logit of each token that was generated before."""
    frequency_penalty: float = 0.0
    """Taken off as often as it was generated."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in the prompt, or generated."""
    bias: tuple[tuple[int, float], ...] = ()
    """Tokens, and what is added to their logits."""
    ends: tuple[int, ...] = ()
    """Tokens that end it. The one that did is reported, but is no text."""
    logprobs: int | None = None
    """Report the log-probability of each token, and those of so many likeliest ones."""
    processed: bool = False
    """Of the distribution that was drawn from, instead of the model's own."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens from the second on. Nothing of it is found in the cache."""
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0, 100)
        _within("top_k", self.top_k, 1, _TOKENS)
        _within("top_p", self.top_p, 0, 1)
        _within("min_p", self.min_p, 0, 1)
        _within("seed", self.seed, -(2**63), 2**63 - 1)
        _within("presence_penalty", self.presence_penalty, -100, 100)
        _within("frequency_penalty", self.frequency_penalty, -100, 100)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _within("the number of biased tokens", len(self.bias), 0, MAX_BIAS)
        _within("the number of end tokens", len(self.ends), 0, MAX_ENDS)
        for token, value in self.bias:
            _within("a biased token", token, 0, _TOKENS - 1)
            _within("a bias", value, -1000, 1000)
        for token in self.ends:
            _within("an end token", token, 0, _TOKENS - 1)


def _within(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # NaN is not, either
        raise IngotError(f"{name} is {value}", hint=f"give a number from {low} to {high}")


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One prompt to go on from.

    >>> Request(id=1, prompt=(5, 6, 7), max_tokens=16).total
    19
    >>> Request(id=1, prompt=(), max_tokens=16)
    Traceback (most recent call last):
    ...
    ingot.core.errors.IngotError: request 1 has an empty prompt
      hint: give at least one token
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
    options: Options = Options()
    """The sampler's business."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise self._error("has an empty prompt", "give at least one token")
        if min(self.prompt) < 0 or max(self.prompt) >= _TOKENS:
            raise self._error("has a token that is none", f"give numbers from 0 to {_TOKENS - 1}")
        if not 1 <= self.max_tokens < _TOKENS:
            raise self._error(f"asks for {self.max_tokens} tokens", "ask for at least one")
        if abs(self.priority) > MAX_PRIORITY:
            hint = f"give a number from {-MAX_PRIORITY} to {MAX_PRIORITY}"
            raise self._error(f"has priority {self.priority}", hint)
        if self.deadline is not None and not math.isfinite(self.deadline):
            raise self._error(f"has deadline {self.deadline}", "give a finite time, or None")

    def _error(self, what: str, hint: str) -> IngotError:
        return IngotError(f"request {self.id} {what}", hint=hint)

    @property
    def total(self) -> int:
        """The tokens it has when it ends by length."""
        return len(self.prompt) + self.max_tokens
