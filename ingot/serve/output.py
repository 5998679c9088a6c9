"""What the engine tells of a step: tokens, their log-probabilities, ends, and its own figures.

No torch here: the HTTP process reads these and has none.
"""

from __future__ import annotations

import msgspec

from ingot.serve.request import Reason


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """The log-probability of a token, and the likeliest tokens in its place with theirs.

    >>> Logprob(5, -0.25, ((5, -0.25), (9, -2.0))).top[0]
    (5, -0.25)
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Output(msgspec.Struct, frozen=True):
    """What a step did for one request.

    >>> Output(7, (11, 12), end=Reason.LENGTH).tokens
    (11, 12)
    """

    id: int
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Logprob, ...] | None = None
    """One for each of the tokens, if it asked for them."""
    prompt_logprobs: tuple[Logprob, ...] | None = None
    """Once, when all of the prompt is computed: of its tokens from the second on."""
    cached: int | None = None
    """Once, at the start: how many tokens of the prompt were found in the cache."""
    end: Reason | None = None


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's figures: how it stands, and sums since its start.

    >>> Stats(blocks=100, used=25).usage
    0.25
    """

    running: int = 0
    waiting: int = 0
    blocks: int = 0
    used: int = 0
    """Blocks in use by requests; cached ones that nobody uses are free."""
    steps: int = 0
    prompt_tokens: int = 0
    """Tokens of the prompts that were started."""
    cached_tokens: int = 0
    """Those of them that were found in the cache."""
    generated_tokens: int = 0
    preemptions: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def usage(self) -> float:
        """The share of the blocks that is in use."""
        return self.used / self.blocks if self.blocks else 0.0
