from __future__ import annotations

from pathlib import Path

import pytest

import ingot
from ingot.bench import engine
from ingot.core.errors import IngotError


def test_optimizations_do_not_change_tokens(small: Path) -> None:
    rounds: list[int] = []
    speedups = engine.measure_speedups(ingot.LLM(small), 2, rounds.append)
    assert [speedup.name for speedup in speedups] == ["ngram", "prefix", "int4"]
    assert all(speedup.same_tokens for speedup in speedups)
    assert rounds == [1] * 6
    prefix = speedups[1]
    assert prefix.ratio > 1


def test_decode_steps_are_compared_with_reading(small: Path) -> None:
    progress: list[int] = []
    steps = engine.decode(ingot.LLM(small), 3, progress.append)
    assert [row.batch_size for row in steps] == [1, 8, 32]
    assert progress == [1] * 9
    for row in steps:
        assert row.tokens_per_s == pytest.approx(row.batch_size / row.step_s)
        assert 0 < row.roofline_fraction < 1.5  # a small model is far below the bandwidth


def test_options_are_compared_with_a_step_without_them(small: Path) -> None:
    rounds: list[int] = []
    options = engine.measure_options(ingot.LLM(small), 3, rounds.append)
    kinds = ("raw log-probabilities", "processed log-probabilities", "one adapter", "8 adapters")
    assert tuple(option.name for option in options) == kinds
    assert rounds == [1] * 3
    for option in options:
        assert option.step_s > 0
        assert 0 < option.speed_ratio < 3


def test_an_int8_cache_is_compared_with_one_in_the_dtype_of_the_model(small: Path) -> None:
    llm, rounds = ingot.LLM(small), list[int]()
    found = engine.measure_int8_cache(llm, 3, rounds.append)
    assert found.name == "int8 KV cache after 512 tokens"
    assert 0 < found.speed_ratio < 3
    assert (rounds, llm.decoder.kv_cache_dtype) == ([1] * 3, "auto")


def test_untied_embedding_is_not_read(small: Path) -> None:
    decoder = ingot.LLM(small).decoder
    whole = sum(parameter.nbytes for parameter in decoder.parameters())
    untied = decoder.lm_head is not None
    assert engine._weight_bytes(decoder) == whole - untied * decoder.tok_embed.weight.nbytes


def test_different_tokens_are_reported() -> None:
    texts = iter(([1], [1], [1], [2]))

    def run() -> tuple[float, list[int]]:
        return 1.0, next(texts)

    speedup = engine._speedup("", "", run, run, 1, lambda _: None)
    assert not speedup.same_tokens


def test_zero_rounds_are_rejected(small: Path) -> None:
    with pytest.raises(IngotError, match="must be from 1 to 1000, got 0"):
        engine.measure_speedups(ingot.LLM(small), 0)
