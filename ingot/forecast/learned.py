"""What is learned from a library of runs: priors of the laws, trust in the experts, and bands.

`benchmarks/forecast_runs.py pack` learns them and writes `learned.json`, which the package ships.
"""

# pyright: basic
from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.errors import DataError
from ingot.core.paths import write_atomic
from ingot.forecast import law
from ingot.forecast.band import Calibration, estimate_spread
from ingot.forecast.curve import BINS, Floats, Target
from ingot.forecast.judge import EXPERTS, Experts, Opinion, mix, weigh
from ingot.forecast.runs import RunLibrary

NAME = "learned.json"
_HEALTHY = np.log(1.3)  # largest log of the end of a run over its best loss
_NOISE = 0.03  # of the laws on whole runs
_FOLDS = 5
_MOMENTS = 3  # of a run that are forecast
_TRUST = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 9.0)
_BASELINE = "power law"
_MAX_ERROR = 1.0  # counted; further off is as bad


@dataclass(frozen=True)
class Setting:
    """What is learned for known tasks, or for unknown ones."""

    trust: Mapping[str, float]
    """Constant of each expert's weight."""
    calibration: Calibration
    """Bands."""


@dataclass(frozen=True)
class Learned:
    """What is learned from a library.

    >>> sorted(Learned.load().priors)
    ['annealing law', 'multi-power law', 'power law']
    """

    priors: Mapping[str, law.Prior]
    """Prior of each law's coefficients."""
    known: Setting
    """For tasks that are in the library."""
    unknown: Setting
    """For other tasks."""

    @classmethod
    def load(cls, path: Path | None = None) -> Learned:
        """Read the file; by default that of the package."""
        source = Path(str(files("ingot.forecast"))) / NAME if path is None else path
        try:
            content = json.loads(source.read_text())
            priors = {
                name: law.Prior(*(np.array(values[key], dtype=float) for key in _PRIOR))
                for name, values in content["priors"].items()
            }
            return cls(priors, *(_read_setting(content[key]) for key in ("known", "unknown")))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{source}: cannot be read: {error}"[:300],
                hint="install ingot again, or make it with benchmarks/forecast_runs.py",
            ) from error

    def save(self, path: Path) -> None:
        """Write the file, with four digits of each number."""
        priors = {
            name: {key: _round(getattr(prior, key)) for key in _PRIOR}
            for name, prior in self.priors.items()
        }
        content = {
            "priors": priors,
            **{
                key: {"trust": dict(found.trust), "bands": _round(found.calibration.table)}
                for key, found in (("known", self.known), ("unknown", self.unknown))
            },
        }
        write_atomic(path, json.dumps(content) + "\n")


_PRIOR = ("mean", "covariance", "log_weight")


def learn(library: RunLibrary, targets: Iterable[Target]) -> Learned:
    """Learn from all finished runs of a library.

    Each run is forecast at some moments by the others: those of other folds, for known tasks, and
    those of other data, for unknown ones.
    """
    cases = [case for target in targets for case in _forecast_all(library.finished(target), target)]
    settings = [_learn_setting([c for c in cases if c.unknown is flag]) for flag in (False, True)]
    return Learned(learn_priors(library.finished("validation_loss")), *settings)


def learn_priors(library: RunLibrary) -> dict[str, law.Prior]:
    """Learn the priors of the laws from the runs that ended near their best loss."""
    values = library.log_loss["validation_loss"]
    kept = values[:, -1] < values.min(1) + _HEALTHY
    return {
        name: law.learn_prior(
            np.array([features(lr) for lr in library.lr[kept]]), values[kept], noise=_NOISE
        )
        for name, features in law.LAWS.items()
    }


@dataclass(frozen=True)
class _Case:
    """A run at one moment, forecast by others."""

    unknown: bool
    data: str
    now: int
    errors: dict[str, float]
    """Of the backtests, by expert."""
    opinion: Opinion
    truth: Floats


def _forecast_all(library: RunLibrary, target: Target) -> Iterable[_Case]:
    data = np.array([task.partition("/")[0] for task in library.tasks])
    folds = np.arange(len(library)) % _FOLDS
    for unknown, groups in ((False, folds), (True, data)):
        if len(set(groups.tolist())) < 2:
            continue
        for group in sorted(set(groups.tolist())):
            others = library.select(groups != group)
            priors = learn_priors(others)
            for row in np.flatnonzero(groups == group):
                curve = library.curve(int(row), target, steps=BINS)
                experts = Experts(others, priors, curve)
                for now in _moments(int(row)):
                    errors, truth = experts.backtest(now).errors(), curve.log_loss[now:]
                    yield _Case(unknown, data[row], now, errors, experts.ask(now), truth)


def _moments(row: int) -> list[int]:
    """Return moments of a run, spread over all runs."""
    return [5 + (row * 7 + part * 15) % 44 for part in range(_MOMENTS)]


def _learn_setting(cases: list[_Case]) -> Setting:
    trust = _learn_trust(cases)
    return Setting(trust, _calibrate(cases, trust))


def _read_setting(content: Mapping[str, Any]) -> Setting:
    trust = {name: float(content["trust"][name]) for name in EXPERTS}
    return Setting(trust, Calibration(np.array(content["bands"], dtype=float)))


def _learn_trust(cases: list[_Case]) -> dict[str, float]:
    """Return the constants with the least mean error, one expert after another."""
    trust = dict.fromkeys(EXPERTS, 0.0)
    for _ in range(2):
        for name in reversed(EXPERTS):
            options = [{**trust, name: value} for value in _TRUST]
            trust = min(options, key=lambda option: _error(cases, option))
    return trust


def _error(cases: list[_Case], trust: Mapping[str, float]) -> float:
    """Return the mean error, relative to that of the power law on the same data."""
    errors: dict[str, list[tuple[float, float]]] = {}
    for case in cases:
        path = mix(case.opinion.paths, weigh(case.errors, trust))
        both = (abs(p[-1] - case.truth[-1]) for p in (path, case.opinion.paths[_BASELINE]))
        own, other = (min(float(error), _MAX_ERROR) for error in both)
        errors.setdefault(case.data, []).append((own, other))
    means = (np.mean(pairs, axis=0) for pairs in errors.values())
    return float(np.mean([own / max(other, 1e-9) for own, other in means]))


def _calibrate(cases: list[_Case], trust: Mapping[str, float]) -> Calibration:
    scores: list[Floats] = []
    for case in cases:
        paths, weights = case.opinion.paths, weigh(case.errors, trust)
        spread = estimate_spread(paths, weights, case.opinion.variance)
        scores.append(np.abs(mix(paths, weights) - case.truth) / spread)
    return Calibration.learn([case.now for case in cases], scores)


def _round(values: Floats) -> object:
    return json.loads(json.dumps(np.vectorize(lambda x: float(f"{x:.4g}"))(values).tolist()))
