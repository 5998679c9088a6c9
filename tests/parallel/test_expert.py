"""Experts that are computed where they are stored have the bits of a single process."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.core.errors import ConfigError
from ingot.parallel.expert import check_experts
from tests.parallel.comparison import EXPERTS, Jobs, compare
from tests.training import runs

FAULT = "sum in turn"
CASES = ["experts", "experts-accum", "experts-full"]
JOBS: Jobs = {
    1: [{"name": "one", "cases": CASES, "steps": 3}],
    4: [
        {"name": "4-ep", "cases": CASES, "parallel": {"ep": 4}, "steps": 3},
        {"name": "2-dp-2-ep", "cases": CASES, "parallel": {"dp": 2, "ep": 2}, "steps": 3},
        # Sums of bfloat16 in float32 often have no rounding, and then no order.
        {"name": "wrong", "cases": CASES[1:2], "parallel": {"ep": 4}, "steps": 3, "fault": FAULT},
    ],
}


def test_experts_on_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """Also with several micro-batches in a shard, with recomputation, and in float32."""
    compared = compare(JOBS, tmp_path)
    assert compared.pop(("wrong", "experts-accum"))  # another order of summation is noticed
    assert compared == {key: [] for key in compared}
    assert len(compared) == 6


def test_experts_that_cannot_be_divided_are_an_error() -> None:
    with pytest.raises(ConfigError, match="the model has no experts"):
        check_experts(runs.TINY, 2)
    with pytest.raises(ConfigError, match=r"must divide model\.moe\.num_experts, 8, got 3"):
        check_experts(EXPERTS, 3)
