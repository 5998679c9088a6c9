"""Every shape at its beginning, its end and between."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError
from ingot.training.schedule import LRSchedule

SHAPES: list[Any] = ["constant", "cosine", "linear", "polynomial", "wsd"]


@pytest.mark.parametrize("shape", SHAPES)
def test_warm_up_rises_to_the_peak(shape: Any) -> None:
    schedule = LRSchedule(kind=shape, warmup_steps=4)
    assert [schedule.lr_factor(step, 100) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_the_last_step_has_the_final_factor(shape: Any) -> None:
    assert LRSchedule(kind=shape, warmup_steps=3, min_lr_ratio=0.2).lr_factor(
        49, 50
    ) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("schedule", "middle"),
    [
        (LRSchedule(kind="constant", min_lr_ratio=0.0), 1.0),
        (LRSchedule(kind="cosine", min_lr_ratio=0.0), 0.5 + 0.5 * math.cos(math.pi * 0.75)),
        (LRSchedule(kind="linear", min_lr_ratio=0.0), 0.25),
        (LRSchedule(kind="polynomial", min_lr_ratio=0.0), 0.0625),
        (LRSchedule(kind="polynomial", min_lr_ratio=0.0, power=3), 0.25**3),
        (LRSchedule(kind="wsd", min_lr_ratio=0.0, decay_ratio=0.5), 0.5),
        (LRSchedule(kind="wsd", min_lr_ratio=0.5), 1.0),
        (LRSchedule(kind="linear", min_lr_ratio=0.2), 0.4),
    ],
)
def test_three_quarters_of_the_way(schedule: LRSchedule, middle: float) -> None:
    assert schedule.lr_factor(75, 101) == pytest.approx(middle)


@given(st.sampled_from(SHAPES), st.integers(0, 20), st.integers(1, 60), st.floats(0, 1))
def test_the_factor_never_rises_after_warmup(
    shape: Any, warmup_steps: int, steps: int, min_lr_ratio: float
) -> None:
    schedule = LRSchedule(kind=shape, warmup_steps=warmup_steps, min_lr_ratio=min_lr_ratio)
    factors = [schedule.lr_factor(step, steps) for step in range(steps + 5)]
    assert all(0 <= factor <= 1 for factor in factors)
    after_warmup = factors[warmup_steps:]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(after_warmup))


@pytest.mark.parametrize(
    "options",
    [
        {"warmup_steps": -1},
        {"min_lr_ratio": 1.1},
        {"power": 2.0},
        {"kind": "wsd", "decay_ratio": 2.0},
        {"decay_ratio": 0.1},
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LRSchedule(**options)
