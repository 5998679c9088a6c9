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
    "the learning rate has risen",
    "the learning rate will rise",
    "gradients oppose the momentum",
    "the momentum is small for the gradients",
    "gradients outgrow the second moments",
    "updates are large for the weights",
    "updates grow",
    "weights grow",
    "updates are long for the slope of the loss",
    "the loss falls less than its slope predicts",
)
_VALUES = ("mean", "deviation", "weight")
_NEEDED = ("loss", "grad_norm")
_LOGS = (*_NEEDED, "clip_factor", "update_norm", "weight_norm", "momentum_norm", "mean_sqrt_v")
_COLUMNS = (*_LOGS, "grad_momentum_cos", "grad_update_cos")
_WINDOW, _RECENT, _LATEST = 60, 20, 5  # steps
_BOUND = 10.0  # of a feature
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
            columns = [[float(content["features"][f][k]) for f in FEATURES] for k in _VALUES]
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
            name: dict(zip(_VALUES, (round(float(v), 4) for v in values), strict=True))
            for name, values in zip(FEATURES, columns, strict=True)
        }
        content = {"bias": round(self.bias, 4), "threshold": round(self.threshold, 4)}
        write_atomic(path, json.dumps({**content, "features": features}, indent=1) + "\n")

    def terms(self, features: Floats) -> Floats:
        """Return what each feature adds to the log odds."""
        found = self.weight * (features - self.mean) / self.deviation
        return np.where(np.isnan(found), 0.0, found)

    def probability(self, features: Floats) -> float:
        """Return the hazard."""
        odds = self.bias + float(self.terms(features).sum())
        return 1 / (1 + math.exp(-min(max(odds, -50.0), 50.0)))


class StepFeatures:
    """The features of a run, from the lines of its `metrics.jsonl`.

    `planned_lr` is the learning rate by step, from 0. A feature is not a number where the lines
    lack what it is computed from: only AdamW reports the statistics of its updates.
    """

    def __init__(self, planned_lr: Callable[[int], float]) -> None:
        self._planned_lr = planned_lr
        self._rows: deque[list[float]] = deque(maxlen=_WINDOW)
        self._best = self._lowest = math.inf  # of medians: of the latest losses, of recent norms
        self._first: float | None = None

    def add(self, line: Mapping[str, Any]) -> Floats | None:
        """Read a line; return the features at every fifth step, after the first 20."""
        step = line.get("step")
        if type(step) is not int or not all(_is_positive(line.get(k)) for k in _NEEDED):
            return None
        self._rows.append([_read(line, name) for name in _COLUMNS])
        if step % EVERY or len(self._rows) < _RECENT:
            return None
        return self._compute(step)

    def _compute(self, step: int) -> Floats:
        window = dict(zip(_COLUMNS, np.array(self._rows).T, strict=True))
        losses, norms = window["loss"], window["grad_norm"]
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
            min(max(math.log(lr[0] / lr[1]), -_RISE), _RISE),
            min(max(math.log(lr[2] / lr[0]), 0.0), _RISE),
            *_describe_updates(window),
        )
        return np.clip(np.array(values), -_BOUND, _BOUND)


def _describe_updates(window: Mapping[str, Floats]) -> tuple[float, ...]:
    """Return the features that need the statistics of the update."""
    clipped = window["grad_norm"] + window["clip_factor"]
    relative, weights = window["update_norm"] - window["weight_norm"], window["weight_norm"]
    lag = clipped - window["mean_sqrt_v"]
    slope = np.exp(clipped + window["update_norm"]) * np.abs(window["grad_update_cos"])
    loss = np.exp(window["loss"])
    fall = float(loss[-20:-10].mean() - loss[-10:].mean())
    return (
        -_mean(window["grad_momentum_cos"]),
        -_mean((window["momentum_norm"] - clipped)[-10:]),
        _mean(lag[-10:]) - _mean(lag),
        _mean(relative[-10:]),
        _mean(relative[-10:]) - _mean(relative[:-10]),
        _mean(weights[-10:]) - _mean(weights[-20:-10]),
        math.log(_mean(slope[-10:]) / float(loss[-10:].mean()) + 1e-12),
        -fall / (10 * _mean(slope[-15:]) + 1e-12),
    )


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


def _read(line: Mapping[str, Any], name: str) -> float:
    """Return a value of a line, or its logarithm; not a number if the line does not have it."""
    value = line.get(name, 1.0 if name == "clip_factor" else None)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return math.nan
    if name not in _LOGS:
        return float(value)
    return math.log(value) if value > 0 else math.nan


def _mean(values: Floats) -> float:
    """Return the mean of those that are numbers."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


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
