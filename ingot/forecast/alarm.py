"""An alarm before a run diverges: a logistic hazard of the metrics of its steps.

    hazard = sigmoid(bias + sum_i weight_i (feature_i - mean_i) / deviation_i)

is the probability that the loss diverges within the next 25 steps: that it loses 30 % of what it
has gained, for a median of 15 steps, or is not finite. The features are ratios and logarithms, so
neither the loss's unit nor the size of the model is in them. The weights are learned from a library
of runs (`benchmarks/forecast_alarm.py`), and the threshold is that of one false alarm in 1,000
steps of it. Each term of the sum says how much it adds, so an alarm names its three largest.

It is computed at every fifth step, from losses and gradient norms of the last 60, and the planned
learning rate.
"""

# pyright: basic
from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from ingot.core.errors import DataError
from ingot.core.paths import write_atomic
from ingot.forecast.curve import Floats

NAME = "alarm.json"
AHEAD = 25
"""Steps ahead for which a hazard is."""
EVERY = 5
"""Steps between two hazards."""
PAUSE = 50
"""Steps after an alarm without another."""
FEATURES = (
    "the loss is above its recent values",
    "the loss is above its best",
    "the loss is near its start",
    "the loss rises",
    "the loss is unsteady",
    "the gradient norm is above its recent values",
    "the gradient norm is above its lowest",
    "the gradient norm rises",
    "the gradient norm is unsteady",
    "gradients are clipped",
    "the learning rate has risen",
    "the learning rate will rise",
)
_WINDOW, _RECENT, _LATEST = 60, 20, 5  # steps
_BOUND = 6.0  # of a feature
_RISE = 0.1  # of the log learning rate, at most: every warm-up is steep at its start


@dataclass(frozen=True)
class Warned:
    """An alarm: the probability that the run diverges within 25 steps, and why."""

    step: int
    probability: float
    reasons: tuple[str, ...]
    """The features that add most, the largest first."""


@dataclass(frozen=True)
class Hazard:
    """A logistic model of the features.

    >>> Hazard.load().probability(np.zeros(len(FEATURES))) < 0.1
    True
    """

    mean: Floats
    deviation: Floats
    weight: Floats
    bias: float
    threshold: float
    """Hazard from which there is an alarm."""

    @classmethod
    def load(cls, path: Path | None = None) -> Hazard:
        """Read the file; by default that of the package."""
        source = Path(str(files("ingot.forecast"))) / NAME if path is None else path
        try:
            content = json.loads(source.read_text())
            columns = [[float(content["features"][f][k]) for f in FEATURES] for k in _COLUMNS]
            mean, deviation, weight = (np.array(column) for column in columns)
            return cls(mean, deviation, weight, float(content["bias"]), float(content["threshold"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{source}: cannot be read: {error}"[:300],
                hint="install ingot again, or make it with benchmarks/forecast_alarm.py",
            ) from error

    def save(self, path: Path) -> None:
        """Write the file."""
        columns = zip(self.mean, self.deviation, self.weight, strict=True)
        features = {
            name: dict(zip(_COLUMNS, (round(float(v), 4) for v in values), strict=True))
            for name, values in zip(FEATURES, columns, strict=True)
        }
        content = {"bias": round(self.bias, 4), "threshold": round(self.threshold, 4)}
        write_atomic(path, json.dumps({**content, "features": features}, indent=1) + "\n")

    def terms(self, features: Floats) -> Floats:
        """Return what each feature adds to the log odds."""
        return self.weight * (features - self.mean) / self.deviation

    def probability(self, features: Floats) -> float:
        """Return the hazard."""
        odds = self.bias + float(self.terms(features).sum())
        return 1 / (1 + math.exp(-min(max(odds, -50.0), 50.0)))


_COLUMNS = ("mean", "deviation", "weight")


class StepFeatures:
    """The features of a run, from the lines of its `metrics.jsonl`.

    `planned_lr` is the learning rate by step, from 0.
    """

    def __init__(self, planned_lr: Callable[[int], float]) -> None:
        self._planned_lr = planned_lr
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._norms: deque[float] = deque(maxlen=_WINDOW)
        self._clipped: deque[bool] = deque(maxlen=_RECENT)
        self._best = self._lowest = math.inf  # of medians: of the latest losses, of recent norms
        self._first: float | None = None

    def add(self, line: Mapping[str, Any]) -> Floats | None:
        """Read a line; return the features at every fifth step, after the first 20."""
        step, loss, norm = (line.get(key) for key in ("step", "loss", "grad_norm"))
        if type(step) is not int or not _is_positive(loss) or not _is_positive(norm):
            return None
        self._losses.append(math.log(loss))
        self._norms.append(math.log(norm))
        clipped = line.get("clip_factor", 1.0)
        self._clipped.append(isinstance(clipped, float) and clipped < 1)
        if step % EVERY or len(self._losses) < _RECENT:
            return None
        return self._compute(step)

    def _compute(self, step: int) -> Floats:
        losses, norms = np.array(self._losses), np.array(self._norms)
        latest = float(np.median(losses[-_LATEST:]))
        norm = float(np.median(norms[-_RECENT:]))
        self._best, self._lowest = min(self._best, latest), min(self._lowest, norm)
        if self._first is None:
            self._first = float(np.median(losses[:_LATEST]))
        lr = [max(self._planned_lr(max(0, s)), 1e-12) for s in (step, step - _RECENT, step + AHEAD)]
        values = (
            _deviations(losses),
            latest - self._best,
            latest - self._first,
            _rise(losses),
            math.log(_spread(np.diff(losses[-_RECENT:]))),
            _deviations(norms),
            norm - self._lowest,
            _rise(norms),
            math.log(_spread(norms[-_RECENT:])),
            float(np.mean(self._clipped)),
            min(max(math.log(lr[0] / lr[1]), -_RISE), _RISE),
            min(max(math.log(lr[2] / lr[0]), 0.0), _RISE),
        )
        return np.clip(np.array(values), -_BOUND, _BOUND)


class Alarm:
    """Watches one run.

    >>> alarm = Alarm(Hazard.load(), planned_lr=lambda step: 1e-3)
    >>> quiet = ({"step": s, "loss": 2 + 1 / s, "grad_norm": 1.0} for s in range(1, 200))
    >>> any(alarm.add(line) for line in quiet)
    False
    """

    def __init__(self, hazard: Hazard, planned_lr: Callable[[int], float]) -> None:
        self.hazard = hazard
        self._features = StepFeatures(planned_lr)
        self._last = -PAUSE

    def add(self, line: Mapping[str, Any]) -> Warned | None:
        """Read a line of metrics; return an alarm if there is one."""
        features = self._features.add(line)
        if features is None:
            return None
        step, probability = line["step"], self.hazard.probability(features)
        if probability < self.hazard.threshold or 0 <= step - self._last < PAUSE:
            return None
        self._last = step
        terms = self.hazard.terms(features)
        largest = [i for i in np.argsort(-terms)[:3] if terms[i] > 0]
        return Warned(step, probability, tuple(FEATURES[i] for i in largest))


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and 0 < value < math.inf


def _deviations(values: Floats) -> float:
    """Return how far the latest value is above the median, in robust deviations."""
    middle = float(np.median(values))
    mad = float(np.median(np.abs(values - middle)))
    return float(values[-1] - middle) / (1.4826 * mad + 0.01)


def _rise(values: Floats) -> float:
    """Return how far the median of the latest 10 values is above that of the 10 before."""
    return float(np.median(values[-10:]) - np.median(values[-20:-10]))


def _spread(values: Floats) -> float:
    return float(values.std()) + 1e-3
