from __future__ import annotations

from pathlib import Path

import pytest

import ingot
from ingot.bench import engine
from ingot.core.errors import IngotError


def test_shortcuts_change_no_token(small: Path) -> None:
    rounds: list[int] = []
    lookup, prefix = engine.measure(ingot.load(small), 2, rounds.append)
    assert (lookup.name, prefix.name) == ("lookup", "prefix")
    assert lookup.same
    assert prefix.same
    assert rounds == [1] * 4
    assert prefix.ratio > 1


def test_another_text_is_noticed() -> None:
    texts = iter(([1], [1], [1], [2]))

    def run() -> tuple[float, list[int]]:
        return 1.0, next(texts)

    found = engine._gain("", "", run, run, 1, lambda _: None)
    assert not found.same


def test_no_rounds_are_refused(small: Path) -> None:
    with pytest.raises(IngotError, match="0 rounds"):
        engine.measure(ingot.load(small), 0)
