"""The library of finished runs, and what the nearest of them say about a run.

The package ships the curves of several hundred small runs (`benchmarks/forecast_runs.py` makes
them); the user's own finished runs join them. A run is described by the shape of its curve so far,
relative to its last value and divided by its scale, and by the learning rate before and after:

    scale    mean |y_j - y_now| over some earlier bins j
    shape    (y_j - y_now) / scale, log scale, log(lr_j / lr_now) for earlier and later bins j

Neither the loss's unit nor the number of steps or parameters is in it, so runs of other tasks can
be near, although those of the same task are preferred, and among these the ones that are at the
same loss. The forecast is the weighted median of what the nearest runs did from there, in units of
their scale; their quantiles are its spread.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from ingot.core.errors import DataError
from ingot.core.paths import atomic_file
from ingot.forecast.curve import BINS, Floats, LossCurve, Target

NAME = "runs.npz"
_COUNT = 14  # nearest runs
_EARLIER = (0.1, 0.2, 0.4, 0.6, 0.8, 0.9)  # of the bins so far
_LATER = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the bins to come
_SHAPE, _LATER_LR, _EARLIER_LR = 0.5, 0.5, 0.6  # weights of the parts of the description
_LEVEL = 4.0  # weight of the log loss, for runs of the same task
_OTHER_TASK = 8.0  # squared distance of runs of other tasks
_MIN_SCALE = 0.05
_MAX_RUNS = 100_000


@dataclass(frozen=True)
class RunLibrary:
    """Curves of finished runs; rows of the arrays are runs.

    >>> library = RunLibrary.load()
    >>> library.log_loss["loss"].shape == library.lr.shape == (len(library), BINS)
    True
    """

    tasks: tuple[str, ...]
    """What each run has learned, such as "text/decoder"."""
    lr: Floats
    """Learning rate by run and bin."""
    log_loss: Mapping[Target, Floats]
    """Log loss by run and bin; not a number where a run does not have it."""

    def __len__(self) -> int:
        return len(self.tasks)

    @classmethod
    def load(cls, path: Path | None = None) -> RunLibrary:
        """Read a library; by default that of the package."""
        source = Path(str(files("ingot.forecast"))) / NAME if path is None else path
        try:
            with source.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                names: list[Any] = arrays["task_names"].tolist()
                tasks = tuple(str(names[i]) for i in arrays["tasks"])
                lr, loss, validation = (
                    np.asarray(arrays[name], dtype=float) for name in ("lr", "loss", "validation")
                )
        except (OSError, ValueError, KeyError, IndexError, BadZipFile) as error:
            raise DataError(
                f"{source}: the library of runs cannot be read: {error}"[:300],
                hint="install ingot again, or make it with benchmarks/forecast_runs.py",
            ) from error
        if any(part.shape != (len(tasks), BINS) for part in (lr, loss, validation)):
            raise DataError(
                f"{source}: the shapes of its arrays differ", hint="install ingot again"
            )
        log_loss: dict[Target, Floats] = {"loss": loss, "validation_loss": validation}
        return cls(tasks, lr, log_loss)

    def save(self, path: Path) -> None:
        """Write the library, in single precision."""
        names, indices = np.unique(np.array(self.tasks), return_inverse=True)
        with atomic_file(path) as temporary, temporary.open("wb") as file:
            np.savez_compressed(
                file,
                task_names=names,
                tasks=indices.astype(np.uint16),
                lr=self.lr.astype(np.float32),
                loss=self.log_loss["loss"].astype(np.float32),
                validation=self.log_loss["validation_loss"].astype(np.float32),
            )

    def select(self, rows: Any) -> RunLibrary:
        """Return the runs of a mask or of indices."""
        kept = np.arange(len(self))[rows]
        log_loss: dict[Target, Floats] = {t: values[kept] for t, values in self.log_loss.items()}
        return RunLibrary(tuple(self.tasks[i] for i in kept), self.lr[kept], log_loss)

    def add(self, other: RunLibrary) -> RunLibrary:
        """Return the runs of both."""
        log_loss = {t: np.concatenate([v, other.log_loss[t]]) for t, v in self.log_loss.items()}
        lr = np.concatenate([self.lr, other.lr])
        return replace(self, tasks=self.tasks + other.tasks, lr=lr, log_loss=log_loss)

    def differ(self, task: str) -> NDArray[np.bool_]:
        """Return which runs learn something else; models of other sizes do not."""
        kind = task.partition(" ")[0]
        return np.array([other.partition(" ")[0] != kind for other in self.tasks], dtype=bool)

    def finished(self, target: Target) -> RunLibrary:
        """Return the runs that have this loss in all bins."""
        return self.select(np.isfinite(self.log_loss[target]).all(1))

    def curve(self, row: int, target: Target, steps: int) -> LossCurve:
        """Return a run as a curve."""
        values = self.log_loss[target][row]
        known = values[np.isfinite(values)]
        return LossCurve(known, self.lr[row], steps, target, self.tasks[row])


@dataclass(frozen=True)
class Nearest:
    """The runs nearest to one, and what they did after it."""

    rows: NDArray[np.int64]
    """Their rows in the library, the nearest first."""
    weights: Floats
    """Their weights, which sum to one."""
    distance: float
    """Distance of the furthest of them."""
    paths: Floats
    """The log loss of the bins to come if the run did the same, by run and bin."""

    def quantile(self, fraction: float) -> Floats:
        """Return the weighted quantile of the paths in each bin."""
        order = np.argsort(self.paths, axis=0, kind="stable")
        values = np.take_along_axis(self.paths, order, axis=0)
        middle = np.cumsum(self.weights[order], axis=0) - 0.5 * self.weights[order]
        return np.array(
            [np.interp(fraction, middle[:, b], values[:, b]) for b in range(values.shape[1])]
        )

    def variance(self) -> Floats:
        """Return the variance of the paths in each bin, from two quantiles of normal noise."""
        return ((self.quantile(0.9) - self.quantile(0.1)) / 2.56) ** 2


def find_nearest(library: RunLibrary, curve: LossCurve) -> Nearest:
    """Find the finished runs nearest to a curve of at least 4 bins."""
    now, values = curve.now, library.log_loss[curve.target]
    own, own_scale = describe(curve.log_loss[None], curve.lr[None], now)
    others, scales = describe(values, library.lr, now)
    level = (_LEVEL * (values[:, now - 1] - curve.log_loss[-1])) ** 2
    apart = np.where(library.differ(curve.task), _OTHER_TASK, level)
    squared = ((others - own) ** 2).sum(1) + apart
    rows = np.argsort(squared, kind="stable")[:_COUNT]
    widest = max(float(squared[rows[-1]]), 1e-12)
    weights = np.exp(-2 * squared[rows] / widest)
    drops = (values[rows, now:] - values[rows, now - 1 : now]) / scales[rows, None]
    paths = curve.log_loss[-1] + own_scale[0] * drops
    return Nearest(rows, weights / weights.sum(), float(np.sqrt(widest)), paths)


def describe(log_loss: Floats, lr: Floats, now: int) -> tuple[Floats, Floats]:
    """Return the descriptions of runs after `now` bins, by run and feature, and their scales."""
    earlier = [max(0, int(now * part) - 1) for part in _EARLIER]
    later = [min(now, BINS - 1) + int((BINS - 1 - min(now, BINS - 1)) * part) for part in _LATER]
    shape = log_loss[:, earlier] - log_loss[:, now - 1 : now]
    scale = np.abs(shape).mean(1) + _MIN_SCALE
    log_lr = np.log(np.maximum(lr, 1e-12))
    relative = np.clip(log_lr - log_lr[:, now - 1 : now], -3.0, 3.0)
    parts = (
        _SHAPE * shape / scale[:, None],
        np.log(scale)[:, None],
        _LATER_LR * relative[:, later],
        _EARLIER_LR * relative[:, earlier],
    )
    return np.concatenate(parts, axis=1), scale
