"""What the engine says: what a step did for each request, and how the engine is.

No torch here: whoever passes it on need not load it.
"""

from __future__ import annotations

import msgspec

from ingot.serving.engine.request import Reason


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The log-probability of a token, and of the likeliest ones in its place.

    >>> Logprob(5, -0.5, ((5, -0.5), (7, -1.5))).top[0]
    (5, -0.5)
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Output(msgspec.Struct, frozen=True):
    """What a step did for one request.

    >>> Output(7, (11,)).end is None
    True
    """

    id: int
    tokens: tuple[int, ...] = ()
    """New ones. The last may be an end token, which is no text."""
    logprobs: tuple[Logprob, ...] | None = None
    """Of these tokens, if asked for."""
    prompt_logprobs: tuple[Logprob, ...] | None = None
    """Of the prompt's next tokens, if asked for: the first to be told of is the second token."""
    cached: int | None = None
    """The prompt's tokens found in the cache; told once, when it starts."""
    end: Reason | None = None
    """Nothing more comes."""
    error: str | None = None
    """What went wrong, where it failed."""


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine is: now, and counted since its start."""

    running: int
    waiting: int
    blocks_used: int
    blocks: int
    steps: int
    prompt_tokens: int
    """Of requests that started."""
    cached_tokens: int
    """Of those, found in the cache."""
    generated_tokens: int
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int
    """Of those, as they would have been drawn."""
    failed_steps: int
