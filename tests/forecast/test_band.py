from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.forecast.band import COVERAGE, Calibration, adapt, estimate_spread
from ingot.forecast.curve import BINS


def test_scores_like_those_learned_are_covered() -> None:
    rng = np.random.default_rng(0)
    nows = [5 + i % 44 for i in range(2000)]
    scores = [np.abs(rng.standard_normal(BINS - now)) for now in nows]
    calibration = Calibration.learn(nows, scores)
    new = [np.abs(rng.standard_normal(BINS - now)) <= calibration.quantiles(now) for now in nows]
    assert np.concatenate(new).mean() == pytest.approx(COVERAGE, abs=0.02)


def test_few_scores_of_a_moment_are_joined_by_the_others() -> None:
    scores = [np.full(BINS - 10, 2.0)] * 30
    assert Calibration.learn([10] * 30, scores).quantiles(45).tolist() == [2.0] * 5


@given(st.integers(1, BINS - 1))
def test_there_is_a_quantile_for_each_bin(now: int) -> None:
    assert len(Calibration.constant(1.0).quantiles(now)) == BINS - now


def test_the_spread_is_that_of_the_experts_and_of_the_nearest_runs() -> None:
    paths = {"a": np.array([1.0]), "b": np.array([1.0])}
    weights = {"a": 0.5, "b": 0.5}
    assert estimate_spread(paths, weights, np.zeros(1)) == pytest.approx(0.01)
    assert estimate_spread(paths, weights, np.array([0.09])) == pytest.approx(0.3, abs=1e-3)
    paths["b"] = np.array([2.0])
    assert estimate_spread(paths, weights, np.zeros(1)) == pytest.approx(0.5, abs=1e-3)


@given(st.lists(st.floats(0, 100), max_size=9))
def test_a_band_only_grows(misses: list[float]) -> None:
    assert 1.0 <= adapt(np.array(misses)) <= 4.0
