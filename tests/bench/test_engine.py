from __future__ import annotations

from pathlib import Path

import pytest

import ingot
from ingot.bench import engine
from ingot.core.errors import IngotError


def test_shortcuts_change_no_token(small: Path) -> None:
    rounds: list[int] = []
    lookup, prefix = engine.shortcuts(ingot.load(small), 2, rounds.append)
    assert (lookup.name, prefix.name) == ("lookup", "prefix")
    assert lookup.same
    assert prefix.same
    assert rounds == [1] * 4
    assert prefix.ratio > 1


def test_a_step_is_compared_with_reading(small: Path) -> None:
    turns: list[int] = []
    found = engine.decode(ingot.load(small), 3, turns.append)
    assert [row.batch for row in found] == [1, 8, 32]
    assert turns == [1] * 9
    for row in found:
        assert row.tokens_per_s == pytest.approx(row.batch / row.step)
        assert 0 < row.share_of_limit < 1.5  # a small model is far from what reading allows


def test_embeddings_count_once_or_not(small: Path) -> None:
    decoder = ingot.load(small).decoder
    whole = sum(parameter.nbytes for parameter in decoder.parameters())
    untied = decoder.lm_head is not None
    assert engine._weights(decoder) == whole - untied * decoder.tok_embed.weight.nbytes


def test_another_text_is_noticed() -> None:
    texts = iter(([1], [1], [1], [2]))

    def run() -> tuple[float, list[int]]:
        return 1.0, next(texts)

    found = engine._gain("", "", run, run, 1, lambda _: None)
    assert not found.same


def test_no_rounds_are_refused(small: Path) -> None:
    with pytest.raises(IngotError, match="0 rounds"):
        engine.shortcuts(ingot.load(small), 0)
