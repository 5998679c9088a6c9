from __future__ import annotations

import math
from typing import Any

import pytest

from ingot.core.errors import ConfigError
from ingot.serving.costs import CostModel


def test_a_step_takes_reading_and_arithmetic() -> None:
    costs = CostModel(
        weight_bytes=100,
        flops_per_token=10,
        kv_bytes_per_token=3,
        attention_flops=7,
        bandwidth=100,
        peak_flops=1000,
        overhead_s=0.125,
        sequence_s=0.25,
        admission_s=0.5,
    )
    assert costs.step_seconds(0, 0, 0) == 1.125
    assert costs.step_seconds(300, 0, 0) == pytest.approx(1.125 + 3)
    assert costs.step_seconds(0, 50, 0) == pytest.approx(1.125 + 1.5)
    assert costs.step_seconds(0, 0, 1000) == pytest.approx(1.125 + 7)
    assert costs.step_seconds(0, 0, 0, 4, 1) == 1.125 + 4 * 0.25 + 0.5


@pytest.mark.parametrize(
    "wrong",
    [{"bandwidth": 0.0}, {"peak_flops": math.nan}, {"overhead_s": -1.0}, {"sequence_s": math.inf}],
)
def test_costs_are_bounded(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CostModel(**wrong)
