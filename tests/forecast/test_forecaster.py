from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import DataError
from ingot.forecast.curve import BINS, LossCurve
from ingot.forecast.forecaster import Forecaster
from ingot.forecast.learned import Learned
from ingot.forecast.runs import RunLibrary
from tests.forecast import libraries

FORECASTER = Forecaster(RunLibrary.load(), Learned.load())
NOWS = st.integers(5, BINS - 1)


@given(NOWS, st.integers(0, 50))
def test_the_band_contains_the_forecast(now: int, seed: int) -> None:
    found = FORECASTER.forecast(libraries.curve(noise=0.05, seed=seed).prefix(now))
    assert (found.low < found.path).all()
    assert (found.path < found.high).all()
    assert len(found.path) == BINS - now
    assert found.bin_steps[-1] == libraries.STEPS


@given(NOWS, st.floats(-3, 3))
def test_a_factor_of_the_loss_moves_forecast_and_band(now: int, shift: float) -> None:
    curve = libraries.curve(noise=0.02).prefix(now)
    one = FORECASTER.forecast(curve)
    other = FORECASTER.forecast(replace(curve, log_loss=curve.log_loss + shift))
    np.testing.assert_allclose(other.path, one.path + shift, atol=5e-3)
    np.testing.assert_allclose(other.high, one.high + shift, atol=2e-2)


def test_the_same_curve_has_the_same_forecast() -> None:
    curve = libraries.curve(noise=0.02).prefix(20)
    one, other = FORECASTER.forecast(curve), FORECASTER.forecast(curve)
    np.testing.assert_array_equal(one.path, other.path)
    np.testing.assert_array_equal(one.low, other.low)


def test_a_power_law_is_forecast() -> None:
    whole = libraries.curve(noise=0.005)
    found = FORECASTER.forecast(whole.prefix(25))
    value, low, high = found.end
    truth = float(np.exp(whole.log_loss[-1]))
    assert value == pytest.approx(truth, rel=0.1)
    assert low < truth < high


def test_arrivals() -> None:
    found = FORECASTER.forecast(libraries.curve().prefix(25))
    value, low, _ = found.end
    middle = 1.0001 * float(np.exp(found.path[10]))
    arrival = found.arrival(middle)
    assert arrival.step is not None
    assert arrival.earliest is not None
    assert found.step < arrival.earliest <= found.bin_steps[10]
    assert arrival.earliest <= arrival.step <= found.bin_steps[-1]
    assert arrival.latest is None or arrival.step <= arrival.latest
    assert found.arrival(low * 0.9).earliest is None
    assert found.arrival(value * 0.999).latest is None


def test_lower_losses_are_less_likely_and_later() -> None:
    found = FORECASTER.forecast(libraries.curve(noise=0.02).prefix(25))
    value, low, _ = found.end
    likely, unlikely = (found.arrival(loss) for loss in (value * 1.05, (value + low) / 2))
    assert likely.probability > 0.5 > unlikely.probability
    assert likely.step is not None
    assert unlikely.step is not None
    assert likely.step <= unlikely.step
    assert found.arrival(value).probability == pytest.approx(0.5, abs=0.1)
    assert found.arrival(1e-9).step is None


def test_a_run_that_nothing_foresaw_has_no_forecast() -> None:
    whole = libraries.curve()
    values = whole.log_loss[:30].copy()
    values[27:] += 2.0
    found = FORECASTER.forecast(replace(whole, log_loss=values))
    assert found.refusal is not None
    assert "outside of the band" in found.refusal


def test_known_tasks_are_counted() -> None:
    curve = libraries.curve().prefix(25)
    assert FORECASTER.forecast(replace(curve, task="nothing/like it")).same_task == 0
    assert FORECASTER.forecast(replace(curve, task="xor/dense")).same_task > 20


@pytest.mark.parametrize("now", [0, 4, BINS])
def test_curves_that_are_too_short_or_whole_are_errors(now: int) -> None:
    with pytest.raises(DataError, match="at least 100 of 1000 steps"):
        FORECASTER.forecast(libraries.curve().prefix(now))


def test_constant_and_solved_curves_have_forecasts() -> None:
    for level in (0.0, np.log(1e-3)):
        flat = LossCurve(np.full(20, level), np.ones(BINS), 1000, "loss")
        assert FORECASTER.forecast(flat).path[-1] == pytest.approx(level, abs=0.2)
