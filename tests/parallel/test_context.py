"""Ranks that divide the tokens of a micro-batch have the bits of a single process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ingot.core.errors import ConfigError
from ingot.nn import DenseConfig, MoEConfig
from ingot.parallel.config import ParallelConfig
from ingot.parallel.context import check_context
from ingot.training.precision import Precision
from tests.parallel.comparison import Jobs, compare
from tests.training import runs

FAULT = "sum own tokens"
CASES = ["gpt2-bf16", "grouped-heads"]
JOBS: Jobs = {
    1: [{"name": "one", "cases": CASES, "steps": 3}],
    4: [
        {"name": "2-fsdp-2-cp", "cases": CASES, "parallel": {"cp": 2}, "steps": 3},
        {"name": "2-dp-2-cp", "cases": CASES[:1], "parallel": {"dp": 2, "cp": 2}, "steps": 3},
        {"name": "4-cp", "cases": CASES[1:], "parallel": {"cp": 4}, "steps": 3},
        {"name": "wrong", "cases": CASES, "parallel": {"cp": 2}, "steps": 3, "fault": FAULT},
    ],
}


def test_tokens_on_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """With learned positions and biases, and with grouped heads, RoPE and recomputation."""
    compared = compare(JOBS, tmp_path)
    for case in CASES:
        assert compared.pop(("wrong", case))  # sums over parts of the tokens are noticed
    assert compared == {key: [] for key in compared}
    assert len(compared) == 4


def test_models_that_cannot_be_divided_are_an_error() -> None:
    moe = MoEConfig(num_experts=2, top_k=1, ffn_dim=8)
    dense = DenseConfig(in_features=2, hidden_dims=(8,), out_features=2)
    for config, message in (
        (dense, "only divides decoders"),
        (replace(runs.TINY, kv_heads=2, moe=moe), "model.moe"),
        (runs.TINY, "must divide model.kv_heads, 1, got 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_context(config, 2)


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
