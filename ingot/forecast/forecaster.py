"""Forecasts of a run: the loss of the bins to come with a band, and when it reaches a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from ingot.core.errors import DataError
from ingot.forecast.band import adapt, estimate_spread
from ingot.forecast.curve import BINS, Floats, LossCurve, Target, last_step
from ingot.forecast.judge import MIN_BINS, Experts, Opinion, mix, weigh
from ingot.forecast.learned import Learned
from ingot.forecast.runs import RunLibrary

_MAX_MISSES = 0.4  # of the backtests
_KNOWN = 20  # earlier runs of a task, from which it is known
_LIKELY = 0.65  # quantile of the step at which a loss is reached, if it is
_EDGE = 1.2816  # standard deviations from the middle of an 80 % band to its edge


@dataclass(frozen=True)
class Arrival:
    """When the loss reaches a target; a step is None if not within the run."""

    probability: float
    """That it is reached within the run."""
    step: int | None
    """Likely step, if it is reached."""
    earliest: int | None
    """Step at which the lower edge of the band reaches it."""
    latest: int | None
    """Step at which the upper edge does."""


@dataclass(frozen=True)
class Forecast:
    """The loss of a run after `step`, as natural logarithms for each bin to come."""

    step: int
    steps: int
    target: Target
    path: Floats
    low: Floats
    """Lower edge of the 80 % band."""
    high: Floats
    weights: Mapping[str, float]
    """Weight of each expert."""
    backtests: Mapping[str, float]
    """Mean error of each expert's forecasts of the latest bins."""
    expert_paths: Mapping[str, Floats]
    """What each expert forecasts, as `path`."""
    earlier_runs: int
    """Finished runs of the library."""
    same_task: int
    """Those of the same task."""
    refusal: str | None = None
    """Why the forecast is not to be trusted; None if it is."""

    @property
    def end(self) -> tuple[float, float, float]:
        """Final loss, and its band."""
        low, value, high = np.exp([self.low[-1], self.path[-1], self.high[-1]])
        return float(value), float(low), float(high)

    @property
    def ends(self) -> dict[str, float]:
        """Final loss that each expert forecasts."""
        return {name: float(np.exp(path[-1])) for name, path in self.expert_paths.items()}

    @property
    def bin_steps(self) -> list[int]:
        """Last step of each bin to come."""
        return [last_step(k + 1, self.steps) for k in range(BINS - len(self.path), BINS)]

    def arrival(self, loss: float) -> Arrival:
        """Return when the loss first is at most `loss`, from a normal distribution in each bin."""
        target, spread = np.log(loss), (self.high - self.low) / 2 / _EDGE
        reached = [NormalDist().cdf(z) for z in ((target - self.path) / spread).tolist()]
        reached = np.maximum.accumulate(reached)
        likely = self._find_step(reached >= _LIKELY * reached[-1]) if reached[-1] > 0 else None
        earliest, latest = (self._find_step(edge <= target) for edge in (self.low, self.high))
        if likely is not None and earliest is not None:
            likely = max(likely, earliest)
        return Arrival(float(reached[-1]), likely, earliest, latest)

    def _find_step(self, bins: NDArray[np.bool_]) -> int | None:
        found: list[int] = np.flatnonzero(bins).tolist()
        return self.bin_steps[found[0]] if found else None


class Forecaster:
    """Forecasts from a library of runs and what was learned from it.

    >>> forecaster = Forecaster(RunLibrary.load(), Learned.load())
    >>> t = np.arange(1, 21)
    >>> curve = LossCurve(np.log(2 + 3 / t), np.linspace(1, 0, BINS), steps=1000, target="loss")
    >>> forecast = forecaster.forecast(curve)
    >>> value, low, high = forecast.end
    >>> low < value < high
    True
    """

    def __init__(self, library: RunLibrary, learned: Learned) -> None:
        self.library, self.learned = library, learned
        self._finished = lru_cache(library.finished)

    def forecast(self, curve: LossCurve) -> Forecast:
        """Forecast the bins to come."""
        now = curve.now
        if now < MIN_BINS or now >= BINS:
            have = last_step(MIN_BINS, curve.steps)
            raise DataError(
                f"a forecast needs the losses of at least {have} of {curve.steps} steps, and of "
                f"not all, got those of {curve.step}",
                hint="wait for more steps" if now < MIN_BINS else "read the loss itself",
            )
        library = self._finished(curve.target)
        same = sum(name == curve.task for name in library.tasks)
        learned = self.learned.known if same >= _KNOWN else self.learned.unknown
        experts = Experts(library, self.learned.priors, curve)
        tests = experts.backtest(now)
        errors = tests.errors()
        weights = weigh(errors, learned.trust)
        opinion = experts.ask(now)
        misses = tests.scores(weights, learned.calibration)
        path = mix(opinion.paths, weights)
        spread = estimate_spread(opinion.paths, weights, opinion.variance)
        width = learned.calibration.quantiles(now) * adapt(misses) * spread
        return Forecast(
            step=curve.step,
            steps=curve.steps,
            target=curve.target,
            path=path,
            low=path - width,
            high=path + width,
            weights=weights,
            backtests=errors,
            expert_paths=opinion.paths,
            earlier_runs=len(library),
            same_task=same,
            refusal=_refuse(misses, opinion, weights),
        )


def _refuse(misses: Floats, opinion: Opinion, weights: Mapping[str, float]) -> str | None:
    """Return why the forecast is refused, if the backtests were outside of the band too often."""
    missed = float((misses > 1).mean()) if len(misses) else 0.0
    if missed <= _MAX_MISSES:
        return None
    ends = {name: float(np.exp(path[-1])) for name, path in opinion.paths.items()}
    first, second = sorted(weights, key=lambda name: -weights[name])[:2]
    return (
        f"{missed:.0%} of the forecasts of the latest losses were outside of the band; "
        f"{first}: {ends[first]:.4g}, {second}: {ends[second]:.4g}"
    )
