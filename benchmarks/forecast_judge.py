"""How good are the forecasts of `ingot.forecast`, and of each of its experts?

Only fresh runs are forecast: constants were chosen on the others. Each is forecast after 20, 40, 60
and 80 % of its steps by a library that does not have it:

    known task      a third of the fresh runs is left out, three times
    unknown task    all runs of one kind of data are left out

Errors are |log(forecast / truth)| of the final validation loss. A run is healthy if it has no ramp
of the learning rate and ends within 30 % of its best loss.
"""

# pyright: basic
from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ingot.core.errors import DataError
from ingot.forecast.curve import BINS
from ingot.forecast.forecaster import Forecast, Forecaster
from ingot.forecast.judge import EXPERTS
from ingot.forecast.learned import learn
from ingot.forecast.runs import RunLibrary

NOWS = (10, 20, 30, 40)
SPLITS = 3
ENSEMBLE = "weighted"
_ETA_NOW, _ETA_BIN = 20, 39  # from 40 %, to the loss at 80 %, or to those at
_ETA_BINS = (24, 29, 34, 39, 44, 49)


@dataclass(frozen=True)
class Case:
    """A forecast of a run, and its truth."""

    setting: str
    split: int
    data: str
    healthy: bool
    now: int
    forecast: Forecast
    truth: np.ndarray
    """Log loss of all bins."""

    def path(self, method: str) -> np.ndarray:
        """Return what a method forecasts."""
        found = self.forecast
        return found.path if method == ENSEMBLE else found.expert_paths[method]

    def error(self, method: str) -> float:
        """Return the error of the final loss."""
        return abs(float(self.path(method)[-1] - self.truth[-1]))

    @property
    def covered(self) -> bool:
        """Whether the final loss is within the band."""
        return bool(self.forecast.low[-1] <= self.truth[-1] <= self.forecast.high[-1])

    @property
    def width(self) -> float:
        """Width of the band at the end."""
        return float(self.forecast.high[-1] - self.forecast.low[-1])


def forecast_all(library: RunLibrary, ramps: np.ndarray, fresh: np.ndarray) -> Iterator[Case]:
    """Forecast the fresh runs of a library of finished runs in both settings."""
    values = library.log_loss["validation_loss"]
    data = np.array([task.partition("/")[0] for task in library.tasks])
    healthy = ~ramps & (values[:, -1] < values.min(1) + np.log(1.3))
    order = np.random.default_rng(0).permutation(np.flatnonzero(fresh))
    nothing = np.array([], dtype=int)
    settings = [("known task", s, order[s::SPLITS], nothing) for s in range(SPLITS)]
    for kind in np.unique(data[fresh]):
        rows = np.flatnonzero(data == kind)
        settings.append(("unknown task", 0, rows[fresh[rows]], rows))
    for setting, split, rows, same in settings:
        others = library.select(np.setdiff1d(np.arange(len(library)), np.union1d(rows, same)))
        forecaster = Forecaster(others, learn(others, ["validation_loss"]))
        for row in rows:
            curve = library.curve(int(row), "validation_loss", steps=BINS)
            for now in NOWS:
                found = forecaster.forecast(curve.prefix(now))
                yield Case(
                    setting, split, str(data[row]), bool(healthy[row]), now, found, curve.log_loss
                )


def summarize(cases: list[Case]) -> Iterator[dict[str, object]]:
    """Yield a row for each setting, data, moment and method: over the healthy runs, and all."""
    methods = (*EXPERTS, ENSEMBLE)
    for setting in dict.fromkeys(case.setting for case in cases):
        for data in ("all", *sorted({case.data for case in cases})):
            for now in NOWS:
                chosen = [
                    c
                    for c in cases
                    if (c.setting, c.now) == (setting, now) and data in ("all", c.data)
                ]
                power = np.mean([c.error("power law") for c in chosen if c.healthy])
                for method in methods:
                    yield _row(chosen, method, float(power)) | {
                        "setting": setting, "data": data, "percent": 100 * now // BINS
                    }  # fmt: skip


def _row(cases: list[Case], method: str, power: float) -> dict[str, object]:
    errors = np.array([c.error(method) for c in cases if c.healthy])
    splits = sorted({c.split for c in cases})
    means = [
        np.mean([c.error(method) for c in cases if c.healthy and c.split == s]) for s in splits
    ]
    row: dict[str, object] = {
        "method": method,
        "runs": len(errors),
        "mean": errors.mean(),
        "median": np.median(errors),
        "worst": errors.max(),
        "worst split": max(means),
        "to power law": errors.mean() / power,
        "arrival": _arrival(cases, method, (_ETA_BIN,)),
        "arrival at any loss": _arrival(cases, method, _ETA_BINS),
        "mean of all runs": np.mean([c.error(method) for c in cases]),
    }
    if method == ENSEMBLE:
        trusted = [c for c in cases if c.healthy and c.forecast.refusal is None]
        naive = [c.error("power law") for c in cases if c.healthy]
        row |= {
            "coverage": np.mean([c.covered for c in cases if c.healthy]),
            "coverage unless refused": np.mean([c.covered for c in trusted]),
            "refused": 1 - len(trusted) / len(errors),
            "width": np.median([c.width for c in cases if c.healthy]),
            "width of power law": 2 * np.quantile(naive, 0.8),
        }
    return row


def _arrival(cases: list[Case], method: str, bins: tuple[int, ...]) -> float:
    """Return the median |log ratio| of the remaining steps to the losses of `bins`, from 40 %."""
    ratios: list[float] = []
    for case in cases:
        if not case.healthy or case.now != _ETA_NOW:
            continue
        for target in case.truth[list(bins)]:
            if case.truth[: case.now].min() > target:
                real = int(np.flatnonzero(case.truth[case.now :] <= target)[0]) + 1
                ratios.append(abs(float(np.log(_bins_to(case, method, float(target)) / real))))
    return float(np.median(ratios)) if ratios else float("nan")


def _bins_to(case: Case, method: str, target: float) -> int:
    """Return the bins to a loss; a method that does not reach it says the end of the run."""
    if method == ENSEMBLE:
        step = case.forecast.arrival(float(np.exp(target))).step
        return BINS - case.now if step is None else step - case.now  # a bin is a step here
    found = np.flatnonzero(case.path(method) <= target)
    return int(found[0]) + 1 if len(found) else BINS - case.now


def write(rows: list[dict[str, object]], path: Path) -> None:
    """Write the table as CSV with four digits."""
    if not rows:
        raise DataError("no runs to forecast", hint="make them with `train`")
    columns = ["setting", "data", "percent", *max((list(row) for row in rows), key=len)]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(columns)), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
