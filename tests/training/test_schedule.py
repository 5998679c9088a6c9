"""Every shape at its beginning, its end and between."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError
from ingot.training.schedule import Schedule

SHAPES: list[Any] = ["constant", "cosine", "linear", "polynomial", "wsd"]


@pytest.mark.parametrize("shape", SHAPES)
def test_warm_up_rises_to_the_peak(shape: Any) -> None:
    schedule = Schedule(shape=shape, warmup=4)
    assert [schedule.factor(step, 100) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_the_last_step_has_the_final_factor(shape: Any) -> None:
    assert Schedule(shape=shape, warmup=3, final=0.2).factor(49, 50) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("schedule", "middle"),
    [
        (Schedule(shape="constant", final=0.0), 1.0),
        (Schedule(shape="cosine", final=0.0), 0.5 + 0.5 * math.cos(math.pi * 0.75)),
        (Schedule(shape="linear", final=0.0), 0.25),
        (Schedule(shape="polynomial", final=0.0), 0.0625),
        (Schedule(shape="polynomial", final=0.0, power=3), 0.25**3),
        (Schedule(shape="wsd", final=0.0, decay=0.5), 0.5),
        (Schedule(shape="wsd", final=0.5), 1.0),
        (Schedule(shape="linear", final=0.2), 0.4),
    ],
)
def test_three_quarters_of_the_way(schedule: Schedule, middle: float) -> None:
    assert schedule.factor(75, 101) == pytest.approx(middle)


@given(st.sampled_from(SHAPES), st.integers(0, 20), st.integers(1, 60), st.floats(0, 1))
def test_behind_the_warm_up_it_never_rises(
    shape: Any, warmup: int, steps: int, final: float
) -> None:
    schedule = Schedule(shape=shape, warmup=warmup, final=final)
    factors = [schedule.factor(step, steps) for step in range(steps + 5)]
    assert all(0 <= factor <= 1 for factor in factors)
    behind = factors[warmup:]
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(behind))


@pytest.mark.parametrize(
    "options",
    [
        {"warmup": -1},
        {"final": 1.1},
        {"power": 2.0},
        {"shape": "wsd", "decay": 2.0},
        {"decay": 0.1},
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Schedule(**options)
