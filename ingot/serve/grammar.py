"""Text that keeps a grammar: which tokens may come next, by llguidance.

    matcher = Grammars(tokenizer, vocabulary).matcher(Grammar(kind="regex", text="yes|no"))
    matcher.mask()        # (V), true for tokens that may come
    matcher.take([...])   # these came

A grammar comes from a client and may be hostile: its length is bounded by `Grammar`, and what
compiling it and a step of it may cost by llguidance's fuel. Beyond, there is an error for that
request alone.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ingot.core.errors import IngotError
from ingot.serve.request import Grammar

if TYPE_CHECKING:
    from ingot.interop.tokenizer import Tokenizer


class GrammarError(IngotError):
    """A grammar that is none, or costs too much."""


class Grammars:
    """Makes matchers for a model's tokens."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        raise NotImplementedError

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the grammar's beginning."""
        raise NotImplementedError


class Matcher:
    """How far a text is in its grammar."""

    error: str | None = None
    done: bool = False

    def mask(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """The tokens that may come next, (V)."""
        raise NotImplementedError

    def take(self, tokens: Sequence[int]) -> None:
        """These tokens came."""
        raise NotImplementedError
