from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.forecast.judge import EXPERTS, LAST, NEAREST, Experts, mix, weigh
from tests.forecast import libraries

LIBRARY = libraries.library()
ERRORS = st.fixed_dictionaries({name: st.floats(0, 10) for name in EXPERTS})


@given(ERRORS)
def test_weights_sum_to_one_and_each_expert_keeps_a_percent(errors: dict[str, float]) -> None:
    weights = weigh(errors, {})
    assert sum(weights.values()) == pytest.approx(1.0)
    assert min(weights.values()) >= 0.05 / len(EXPERTS)


@given(ERRORS, st.sampled_from(EXPERTS))
def test_a_smaller_error_never_lowers_a_weight(errors: dict[str, float], name: str) -> None:
    better = {**errors, name: errors[name] / 2}
    if min(errors.values()) == min(better.values()):
        assert weigh(better, {})[name] >= weigh(errors, {})[name] - 1e-12


def test_an_expert_that_was_wrong_about_the_past_is_not_trusted() -> None:
    weights = weigh({"right": 0.005, "wrong": 0.5}, {})
    assert weights["right"] > 0.97


def test_forecasts_do_not_see_the_future() -> None:
    whole = libraries.curve(noise=0.02)
    values = whole.log_loss.copy()
    values[20:] = 7.0
    one = Experts(LIBRARY, {}, whole)
    other = Experts(LIBRARY, {}, replace(whole, log_loss=values))
    for name, path in one.ask(20).paths.items():
        np.testing.assert_array_equal(path, other.ask(20).paths[name])
    assert one.backtest(20).errors() == other.backtest(20).errors()


def test_backtests_find_the_error_of_the_last_bins() -> None:
    curve = libraries.curve()
    errors = Experts(LIBRARY, {}, curve).backtest(40).errors()
    known = curve.log_loss
    expected = np.mean([abs(known[at - 1] - known[37:40]) for at in (20, 26, 32)])
    assert errors[LAST] == pytest.approx(expected)


def test_without_a_library_the_laws_remain() -> None:
    empty = LIBRARY.select(np.zeros(len(LIBRARY), dtype=bool))
    opinion = Experts(empty, {}, libraries.curve()).ask(20)
    assert set(opinion.paths) == set(EXPERTS) - {NEAREST}
    assert not opinion.variance.any()


def test_the_mix_is_between_its_paths() -> None:
    paths = {"a": np.array([1.0, 2.0]), "b": np.array([3.0, 6.0])}
    assert mix(paths, {"a": 0.25, "b": 0.75}).tolist() == [2.5, 5.0]
