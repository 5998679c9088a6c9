from __future__ import annotations

import numpy as np
import pytest

from ingot.forecast import law
from ingot.forecast.curve import BINS, Floats
from tests.forecast import libraries

WSD = np.concatenate([np.ones(35), np.linspace(1, 0.01, 15)])


def fit(name: str, lr: Floats, log_loss: Floats) -> Floats:
    features = law.LAWS[name](lr)
    return law.fit(features, log_loss, law.Prior.flat(features), noise=0.003, memory=2.0)


def test_the_power_law_finds_its_own_parameters() -> None:
    truth = 0.3 + 0.9 * libraries.T**-0.5
    found = fit("power law", np.ones(BINS), truth[:20])
    assert found[-1] == pytest.approx(truth[-1], abs=0.01)


@pytest.mark.parametrize("name", list(law.LAWS))
def test_a_factor_of_the_loss_moves_the_path(name: str) -> None:
    seen = libraries.curve(noise=0.01).log_loss[:25]
    one, other = fit(name, WSD, seen), fit(name, WSD, seen + 3.0)
    np.testing.assert_allclose(other, one + 3.0, atol=2e-3)


@pytest.mark.parametrize("name", ["annealing law", "multi-power law"])
def test_a_law_knows_what_decay_does_from_other_runs(name: str) -> None:
    """The prior of runs that fell when the rate did moves a forecast from before the decay."""
    rng = np.random.default_rng(0)
    features = law.LAWS[name](WSD)
    fall = np.concatenate([np.zeros(35), np.linspace(0, 0.2, 15)])
    scales, falls = rng.uniform(0.5, 1.0, 30), rng.uniform(0.9, 1.1, 30)
    runs = 0.5 + np.outer(scales, libraries.T**-0.5) - np.outer(falls, fall)
    prior = law.learn_prior(np.stack([features] * 30), runs, noise=0.01)
    truth = 0.5 + 0.7 * libraries.T**-0.5 - fall
    flat = fit(name, WSD, truth[:30])[-1]
    known = law.fit(features, truth[:30], prior, noise=0.003, memory=2.0)[-1]
    assert abs(known - truth[-1]) < 0.05 < abs(flat - truth[-1])


def test_the_multi_power_law_is_its_double_sum() -> None:
    relative = WSD / WSD.mean()
    sums = np.cumsum(relative) + 0.5
    expected = np.zeros(BINS)
    for t in range(BINS):
        for k in range(1, t + 1):
            since = sums[t] - sums[k] + relative[k]
            expected[t] -= (relative[k - 1] - relative[k]) * (1 - (1 + since / 0.3) ** -0.5)
    np.testing.assert_allclose(law.multi_power(WSD)[0, :, 2], expected, atol=1e-12)


def test_the_momentum_is_the_recurrence_of_the_paper() -> None:
    relative = WSD / WSD.mean()
    momentum, total = 0.0, 0.0
    for t in range(1, BINS):
        momentum = 0.9 * momentum + relative[t - 1] - relative[t]
        total += momentum
    assert law.annealing(WSD)[-1, -1, 2] == pytest.approx(-total)
