"""A forecast as the weighted mean of experts that were tested on the run's own past.

The experts are the last value, three laws (`ingot.forecast.law`) and the nearest finished runs
(`ingot.forecast.runs`). Each forecasts the last bins so far from three earlier moments of the run;
its mean error there, and a constant learned from the library, give its weight:

    weight = 0.95 softmax(trust - error / (0.04 + 4 smallest error)) + 0.05 / experts

Where some expert was right, an error of 4 % of the loss more divides the weight by e. Where none
was, differences count relative to the best.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ingot.forecast import law
from ingot.forecast.band import Calibration, estimate_spread
from ingot.forecast.curve import BINS, Floats, LossCurve
from ingot.forecast.runs import RunLibrary, find_nearest

MIN_BINS = 5
"""Bins that a forecast needs."""
LAST, NEAREST = "last value", "nearest runs"
EXPERTS = (LAST, *law.LAWS, NEAREST)
_TEMPERATURE, _FLOOR = 0.04, 0.05
_ORIGINS = (0.5, 0.65, 0.8)  # moments of the backtest, as fractions of the bins so far
_TESTED = 3  # last bins whose forecasts are compared
_NOISE, _MEMORY = 0.01, 0.5  # of the laws


@dataclass(frozen=True)
class Opinion:
    """What every expert forecasts at one moment."""

    paths: Mapping[str, Floats]
    """Log loss of the bins to come, by expert."""
    variance: Floats
    """Variance of what the nearest runs did, by bin to come."""


class Experts:
    """Forecasts of all experts for one run; a law's features are computed once."""

    def __init__(
        self, library: RunLibrary, priors: Mapping[str, law.Prior], curve: LossCurve
    ) -> None:
        """`library` has finished runs only, see `RunLibrary.finished`."""
        self.library, self.priors, self.curve = library, priors, curve
        self._features = {name: features(curve.lr) for name, features in law.LAWS.items()}

    def ask(self, now: int) -> Opinion:
        """Return the forecasts after `now` bins, from these bins alone."""
        curve = self.curve.prefix(now)
        paths = {LAST: np.full(BINS - now, curve.log_loss[-1])}
        for name, features in self._features.items():
            paths[name] = _fit(features, curve.log_loss, self.priors.get(name))
        variance = np.zeros(BINS - now)
        if len(self.library):
            nearest = find_nearest(self.library, curve)
            paths[NEAREST], variance = nearest.quantile(0.5), nearest.variance()
        return Opinion(paths, variance)

    def backtest(self, now: int) -> Backtest:
        """Forecast the last bins so far from earlier moments."""
        moments = [origin for origin in _origins(now) if origin < now]
        return Backtest(self.curve.log_loss[:now], {at: self.ask(at) for at in moments})


@dataclass(frozen=True)
class Backtest:
    """Forecasts of the last bins of a curve from earlier moments."""

    log_loss: Floats
    opinions: Mapping[int, Opinion]
    """Forecasts by moment."""

    def errors(self) -> dict[str, float]:
        """Return the mean error of each expert."""
        found: dict[str, list[Floats]] = {}
        for origin, opinion in self.opinions.items():
            for name, path in opinion.paths.items():
                tested = self._tested(origin)
                found.setdefault(name, []).append(np.abs(path[tested] - self._known(origin)))
        return {name: float(np.concatenate(parts).mean()) for name, parts in found.items()}

    def scores(self, weights: Mapping[str, float], calibration: Calibration) -> Floats:
        """Return the scores of the weighted mean, in units of the quantile: 1 is at the edge."""
        found: list[Floats] = []
        for origin, opinion in self.opinions.items():
            error = np.abs(mix(opinion.paths, weights)[self._tested(origin)] - self._known(origin))
            spread = estimate_spread(opinion.paths, weights, opinion.variance)
            width = (calibration.quantiles(origin) * spread)[self._tested(origin)]
            found.append(error / width)
        return np.concatenate(found) if found else np.zeros(0)

    def _tested(self, origin: int) -> slice:
        now = len(self.log_loss)
        return slice(max(0, now - _TESTED - origin), now - origin)

    def _known(self, origin: int) -> Floats:
        return self.log_loss[origin:][self._tested(origin)]


def weigh(errors: Mapping[str, float], trust: Mapping[str, float]) -> dict[str, float]:
    """Return the weights of the experts, which sum to one; `trust` is learned from the library.

    >>> found = weigh({"good": 0.01, "bad": 0.09}, {})
    >>> {name: round(weight, 3) for name, weight in found.items()}
    {'good': 0.72, 'bad': 0.28}
    """
    unit = _TEMPERATURE + 4 * min(errors.values())
    logits = np.array([trust.get(name, 0.0) - error / unit for name, error in errors.items()])
    share = np.exp(logits - logits.max())
    share = (1 - _FLOOR) * share / share.sum() + _FLOOR / len(share)
    return dict(zip(errors, share.tolist(), strict=True))


def mix(paths: Mapping[str, Floats], weights: Mapping[str, float]) -> Floats:
    """Return the weighted mean of the paths."""
    return np.sum([weights[name] * path for name, path in paths.items()], axis=0)


def _fit(features: Floats, log_loss: Floats, prior: law.Prior | None) -> Floats:
    """Return a law's path, within twice the range of the curve so far."""
    now, last = len(log_loss), log_loss[-1]
    noise = float(np.hypot(_NOISE, _estimate_noise(log_loss)))
    known = prior or law.Prior.flat(features)
    path = law.fit(features, log_loss, known, noise=noise, memory=_MEMORY)[now:]
    highest, lowest = log_loss.max(), log_loss.min()
    return np.clip(path, last - 2 * (highest - lowest) - 0.1, highest)


def _estimate_noise(log_loss: Floats) -> float:
    """Return the standard deviation of the noise of a bin, from second differences."""
    if len(log_loss) < 3:
        return 0.0
    return float(np.median(np.abs(np.diff(log_loss, 2)))) / 0.6745 / np.sqrt(6.0)


def _origins(now: int) -> list[int]:
    return [max(2, round(now * part)) for part in _ORIGINS]
