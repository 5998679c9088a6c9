"""Guesses at the tokens that come next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ingot.serve.request import Request


class Text(Protocol):
    """A request and its tokens so far."""

    request: Request
    tokens: list[int]


class Proposer(Protocol):
    """Guesses at the tokens that come next."""

    def propose(self, texts: Sequence[Text], most: int) -> list[tuple[int, ...]]:
        """For each text up to `most` tokens that may follow; none is fine."""
        ...

    def forget(self, id: int) -> None:
        """A request has ended."""
        ...
