"""The constants that ship, and the tables of errors that the documentation shows."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from ingot.planning.cost import Constants
from ingot.planning.fit import CONSTANTS_FILE, dump_fitted, load_fitted
from tools import plan_tables


def test_the_constants_that_ship_are_complete_and_plausible() -> None:
    fitted = load_fitted()
    raw = json.loads(CONSTANTS_FILE.read_text())
    assert set(raw["constants"]) == set(asdict(Constants()))
    assert fitted.constants.speed == 1.0
    assert dump_fitted(fitted) == CONSTANTS_FILE.read_text()
    for low, high in fitted.intervals.values():
        assert 0.4 < low < 1 < high < 2.5


def test_an_interval_is_narrower_after_calibration() -> None:
    def width(**kind: bool) -> float:
        low, high = load_fitted().interval(**kind)
        return high / low

    dense = width(is_moe=False, is_calibrated=False)
    assert width(is_moe=False, is_calibrated=True) < dense < width(is_moe=True, is_calibrated=False)


def test_the_constants_are_what_the_published_runs_give() -> None:
    """Not to the last digit: linear algebra libraries differ."""
    kept, fitted = load_fitted(), plan_tables.published()[2]
    assert asdict(fitted.constants) == pytest.approx(asdict(kept.constants), rel=1e-3)
    for name, pair in fitted.intervals.items():
        assert pair == pytest.approx(kept.intervals[name], rel=1e-3)


SLOW = {"ablation"}
"""Tables that need many fits."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in plan_tables.TABLES
    ],
)
def test_the_page_shows_what_the_code_computes(name: str) -> None:
    page = plan_tables.PAGE.read_text()
    assert plan_tables.fill(page, [name]) == page, "run `python -m tools.plan_tables`"
