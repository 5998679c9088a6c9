"""Ranks that divide the tokens of a micro-batch have the bits of a single process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import ConfigError
from ingot.nn import Decoder, MoEConfig
from ingot.parallel import context
from ingot.parallel.config import ParallelConfig
from ingot.parallel.context import split_context
from ingot.parallel.ranks import Ranks
from ingot.training.precision import Precision
from tests.parallel.processes import run_ranks
from tests.parallel.test_shard import Jobs, compare, differences, train_all
from tests.training import runs

JOBS: Jobs = {
    1: [{"name": "one", "cases": ["gpt2-bf16", "grouped-heads"], "steps": 5}],
    4: [
        {"name": "2-fsdp-2-cp", "cases": ["gpt2-bf16", "grouped-heads"], "cp": 2, "steps": 5},
        {"name": "2-dp-2-cp", "cases": ["gpt2-bf16"], "dp": 2, "cp": 2, "steps": 5},
        {"name": "4-cp", "cases": ["grouped-heads"], "cp": 4, "steps": 5},
    ],
}


def test_tokens_on_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """With learned positions and biases, and with grouped heads, RoPE and recomputation."""
    compared = compare(JOBS, tmp_path)
    assert compared == {key: [] for key in compared}
    assert len(compared) == 4


def train_with_divided_sums(ranks: Ranks, options: dict[str, Any], directory: Path) -> None:
    """Sum the gradients of weights over each rank's tokens, then over the ranks: the usual way."""

    def sum_own(op: Any, ranks: Ranks, needs: list[bool], grad: Any, args: list[Any]) -> Any:
        return context._gradients(op, needs, grad, args)

    context._weight_gradients = sum_own
    train_all(ranks, options, directory)


def test_sums_over_parts_of_the_tokens_are_noticed(tmp_path: Path) -> None:
    job = {"cases": ["gpt2-bf16"], "cp": 2, "steps": 2}
    train_all(Ranks(), {"jobs": [{**job, "name": "one", "cp": 1}]}, tmp_path)
    wrong = {"jobs": [{**job, "name": "wrong"}]}
    run_ranks(2, f"{__name__}:train_with_divided_sums", wrong, tmp_path)
    different = differences(tmp_path / "one" / "gpt2-bf16", tmp_path / "wrong" / "gpt2-bf16")
    assert "weights/blocks.0.attention.qkv.weight" in different


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_heads": 1}, "must divide the key-value heads, 1, got 2"),
        ({"kv_heads": 2, "moe": MoEConfig(num_experts=2, top_k=1, ffn_dim=8)}, "experts"),
    ],
)
def test_models_that_cannot_be_divided_are_an_error(options: dict[str, Any], message: str) -> None:
    model = Decoder.on_meta(replace(runs.TINY, **options))
    with pytest.raises(ConfigError, match=message):
        split_context(model, Ranks(0, 2))


@pytest.mark.parametrize(
    ("precision", "cp", "message"),
    [(Precision.FP32, 2, "needs precision=bf16"), (Precision.BF16, 64, "a multiple of 64")],
)
def test_runs_that_cannot_be_divided_are_an_error(
    precision: Precision, cp: int, message: str, tmp_path: Path
) -> None:
    recipe = runs.text(tmp_path, precision=precision, parallel=ParallelConfig(cp=cp))
    with pytest.raises(ConfigError, match=message):
        recipe.check_ranks(cp)
