"""The loss of a run over its planned steps, as 50 values of the log loss.

A bin is a fiftieth of the planned steps. Its value is the log of the validation loss at the last
evaluation in it, if the recipe evaluates often enough, or else of the trimmed mean of the training
losses in it. The learning rate is known for all bins, those to come included.

Everything that forecasts reads these arrays only, so the same code sees a run of 200 steps and one
of 200,000; and a factor on the loss moves all values by the same amount.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ingot.core.errors import DataError

BINS = 50
Floats = NDArray[np.float64]
Target = Literal["validation_loss", "loss"]
_MIN_EVALUATIONS = 25
_TRIM = 0.1  # of the training losses of a bin, at either end
_MIN_LOSS = 1e-3  # smaller losses are equal: the task is solved


@dataclass(frozen=True)
class LossCurve:
    """Log loss of the bins that are complete, and the learning rate of all.

    >>> curve = LossCurve(np.log([4.0, 3.0]), np.ones(BINS), steps=1000, target="loss")
    >>> curve.now, curve.step, curve.prefix(1).log_loss.tolist() == [np.log(4.0)]
    (2, 40, True)
    """

    log_loss: Floats
    """Log loss of the first `now` bins."""
    lr: Floats
    """Mean learning rate of each of the 50 bins."""
    steps: int
    """Planned steps of the run."""
    target: Target
    """Whose loss it is: that of validation, or that of training."""
    task: str = ""
    """What the run learns, such as "text/decoder 1e6"; empty if unknown."""

    @property
    def now(self) -> int:
        """Number of complete bins."""
        return len(self.log_loss)

    @property
    def step(self) -> int:
        """Last step of the last complete bin."""
        return last_step(self.now, self.steps)

    def prefix(self, now: int) -> LossCurve:
        """Return the curve as it was after `now` bins."""
        return replace(self, log_loss=self.log_loss[:now])


def last_step(bins: int, steps: int) -> int:
    """Return the last step of the first `bins` bins.

    >>> last_step(25, 300), last_step(50, 333)
    (150, 333)
    """
    return bins * steps // BINS


def choose_target(eval_every: int, steps: int) -> Target:
    """Return the loss to forecast: that of validation if it is evaluated 25 times or more.

    >>> choose_target(eval_every=20, steps=1000), choose_target(eval_every=0, steps=1000)
    ('validation_loss', 'loss')
    """
    often = eval_every > 0 and steps // eval_every >= _MIN_EVALUATIONS
    return "validation_loss" if often else "loss"


def bin_lr(lr_factor: Callable[[int, int], float], steps: int) -> Floats:
    """Return the mean of a learning-rate schedule in each bin.

    >>> bin_lr(lambda step, steps: step / steps, 100)[:2].tolist()
    [0.005, 0.025]
    """
    _check_steps(steps)
    edges = [last_step(k, steps) for k in range(BINS + 1)]
    sampled = [np.unique(np.linspace(a, b - 1, 16).astype(int)) for a, b in pairwise(edges)]
    means = [sum(lr_factor(int(s), steps) for s in at) / len(at) for at in sampled]
    return np.array(means, dtype=np.float64)


def _check_steps(steps: int) -> None:
    if steps < BINS:
        raise DataError(
            f"steps: a forecast needs a run of at least {BINS} steps, got {steps}",
            hint="raise steps",
        )


class CurveReader:
    """Reads the curve of a run from the lines of its `metrics.jsonl`, one after another.

    The curve ends before the first bin whose loss is not finite. Where the run was rolled back, the
    later lines count.

    >>> reader = CurveReader(np.ones(BINS), steps=100, target="loss")
    >>> for step in range(1, 62):
    ...     reader.add({"step": step, "loss": 100.0 / step})
    >>> curve = reader.curve()
    >>> curve.now, round(float(np.exp(curve.log_loss[-1])), 3)
    (30, 1.681)
    """

    def __init__(self, lr: Floats, steps: int, target: Target, task: str = "") -> None:
        _check_steps(steps)
        self.lr, self.steps, self.task = lr, steps, task
        self.target: Target = target
        self._edges = [last_step(k, steps) for k in range(1, BINS + 1)]
        self._values: list[float] = []  # of complete bins; not a number without a loss
        self._losses: list[float] = []  # of the current bin
        self._step = 0

    def add(self, line: Mapping[str, Any]) -> None:
        """Read a line."""
        step, value = line.get("step"), line.get(self.target)
        if type(step) is not int or not 0 < step <= self.steps:
            return
        if step < self._step:  # rolled back
            at = bisect_left(self._edges, step)
            del self._values[at:]
            self._losses = []
        self._step = step
        self._complete(step - 1)
        if self.target in line:
            self._losses.append(float(value) if isinstance(value, int | float) else np.inf)
            self._complete(step)  # the evaluation of a step comes after it

    def curve(self) -> LossCurve:
        """Return the curve so far."""
        values = np.array(self._values)
        broken = np.flatnonzero(np.isinf(values))
        values = _fill(values[: broken[0]] if len(broken) else values)
        return LossCurve(values, self.lr, self.steps, self.target, self.task)

    @property
    def bins(self) -> int:
        """Number of bins that are complete, with a loss or without."""
        return len(self._values)

    def _complete(self, step: int) -> None:
        while len(self._values) < BINS and self._edges[len(self._values)] <= step:
            self._values.append(_summarize(np.array(self._losses), self.target))
            self._losses = []


def read_curve(
    lines: Iterable[Mapping[str, Any]], lr: Floats, steps: int, target: Target
) -> LossCurve:
    """Return the curve of a run from all lines of its `metrics.jsonl`.

    >>> read_curve([{"step": 1, "loss": 2.0}], np.ones(BINS), steps=100, target="loss").now
    0
    """
    reader = CurveReader(lr, steps, target)
    for line in lines:
        reader.add(line)
    return reader.curve()


def _summarize(losses: Floats, target: Target) -> float:
    """Return the log of a bin's loss: not a number without one, infinite if it is not finite."""
    if not len(losses):
        return np.nan
    if not np.isfinite(losses).all():
        return np.inf
    if target == "loss":
        ordered, cut = np.sort(losses), int(_TRIM * len(losses))
        loss = ordered[cut : len(ordered) - cut].mean()
    else:
        loss = losses[-1]
    return float(np.log(max(float(loss), _MIN_LOSS)))


def _fill(values: Floats) -> Floats:
    """Interpolate bins without a value; those at the end are dropped."""
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        return np.zeros(0)
    return np.interp(np.arange(int(known[-1]) + 1), known, values[known])
