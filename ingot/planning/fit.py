"""Fits the constants of the step-time model to measured runs, and calibrates it with a user's own.

The constants are fitted in log space: the residual of a run is log(predicted / measured). Each
constant has a prior, so that a constant that the runs say little about keeps a plausible value.
Residuals above `_HUBER` count linearly (Huber loss), and a source with n runs has the weight
sqrt(n), since its runs resemble each other. The minimum is found by the Levenberg-Marquardt
algorithm with numerical derivatives, written out here: scipy is not a dependency of ingot, and the
problem has a dozen unknowns.

Calibration moves one number, `Constants.speed`: runs of one system share most of their error.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ingot.core.errors import DataError
from ingot.planning.cost import Constants, Work, count_work, stack, step_time
from ingot.planning.published import MeasuredRun

Floats = npt.NDArray[np.float64]

FITTED = tuple(field.name for field in fields(Constants) if field.name != "speed")
"""Names of the constants that are fitted."""
SPREAD: dict[str, float] = {
    **{"matmul": 0.07, "fp8": 0.1, "fp4": 0.2, "attention": 0.1, "elementwise": 0.3},
    **{"eager": 0.15, "operands": 0.5, "tp_exposed": 0.5, "nvlink": 0.15, "network": 0.15},
    **{"overlap": 0.5, "all_to_all": 1.0, "moe_launch": 0.5, "scale": 0.5},
}
"""Standard deviation of the prior of each constant, in log space."""
CONSTANTS_FILE = Path(__file__).parent / "constants.json"
_SIGMA = 0.2
"""Typical residual of a run."""
_HUBER = 0.1
_MAX_STEPS = 60


@dataclass(frozen=True, kw_only=True)
class FittedModel:
    """Fitted constants, and how far predictions for unseen sources were off."""

    constants: Constants
    spreads: Mapping[str, tuple[float, float]]
    """Standard deviation of log errors by kind of model: of sources, and of runs in a source."""
    intervals: Mapping[str, tuple[float, float]]
    """Measured over predicted, 10th and 90th percentile, by kind of model."""

    def interval(self, *, is_moe: bool, is_calibrated: bool) -> tuple[float, float]:
        """Return the range that 80 % of the measured step times were in, relative to predicted."""
        kind = "moe" if is_moe else "dense"
        return self.intervals[f"{kind} calibrated" if is_calibrated else kind]


@cache
def load_fitted() -> FittedModel:
    """Return the model that ingot ships, fitted to published runs.

    >>> 0.5 < load_fitted().constants.matmul < 1.1
    True
    """
    raw = json.loads(CONSTANTS_FILE.read_text())
    return FittedModel(
        constants=Constants(**raw["constants"]),
        spreads={name: (first, second) for name, (first, second) in raw["spreads"].items()},
        intervals={name: (low, high) for name, (low, high) in raw["intervals"].items()},
    )


def dump_fitted(fitted: FittedModel) -> str:
    """Return the text of the file that `load_fitted` reads."""

    def short(value: float) -> float:
        return float(f"{value:.6g}")

    content = {
        "constants": {name: short(value) for name, value in asdict(fitted.constants).items()},
        "spreads": {name: [short(v) for v in pair] for name, pair in fitted.spreads.items()},
        "intervals": {name: [short(v) for v in pair] for name, pair in fitted.intervals.items()},
    }
    return json.dumps(content, indent=2) + "\n"


def works_of(runs: Sequence[MeasuredRun]) -> Work:
    """Return the work of these runs, stacked."""
    return stack([count_work(run.workload, run.plan, run.cluster) for run in runs])


def source_weights(runs: Sequence[MeasuredRun]) -> Floats:
    """Return the weight of each run: a source with n runs has the weight sqrt(n) in total."""
    counts = Counter(run.source for run in runs)
    return np.array([counts[run.source] ** -0.5 for run in runs])


def log_errors(runs: Sequence[MeasuredRun], constants: Constants) -> Floats:
    """Return log(predicted / measured) of each run."""
    return np.log(step_time(works_of(runs), constants).total) - _log_measured(runs)


def fit(
    runs: Sequence[MeasuredRun],
    prior: Constants | None = None,
    fixed: Mapping[str, float] | None = None,
) -> Constants:
    """Return the constants that fit the runs best; those in `fixed` keep the given value."""
    return fit_work(
        works_of(runs), _log_measured(runs), source_weights(runs), prior=prior, fixed=fixed
    )


def fit_work(
    work: Work,
    log_measured: Floats,
    weights: Floats,
    *,
    prior: Constants | None = None,
    fixed: Mapping[str, float] | None = None,
    prior_width: float = 1.0,
) -> Constants:
    """Fit constants to work that is already counted and stacked."""
    start = replace(prior or Constants(), **(fixed or {}))
    names = [name for name in FITTED if name not in (fixed or {})]
    center: Floats = np.log(np.array([float(getattr(start, name)) for name in names]))
    precision = np.array([(prior_width * SPREAD[name]) ** -2 for name in names])

    def residuals(theta: Floats) -> Floats:
        values = dict(zip(names, np.exp(theta).tolist(), strict=True))
        return np.log(step_time(work, replace(start, **values)).total) - log_measured

    def loss(theta: Floats, r: Floats) -> float:
        size = np.abs(r)
        huber = np.where(size <= _HUBER, size**2, 2 * _HUBER * size - _HUBER**2)
        return float(
            (weights * huber).sum() / _SIGMA**2 + (precision * (theta - center) ** 2).sum()
        )

    theta: Floats = center.copy()
    damping = 1e-3
    r = residuals(theta)
    for _ in range(_MAX_STEPS):
        jacobian = _jacobian(residuals, theta, r)
        omega = weights / _SIGMA**2 * np.minimum(1.0, _HUBER / np.maximum(np.abs(r), 1e-12))
        hessian = (jacobian.T * omega) @ jacobian + np.diag(precision)
        gradient = jacobian.T @ (omega * r) + precision * (theta - center)
        step = -np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
        new: Floats = theta + np.clip(step, -0.5, 0.5)
        new_r = residuals(new)
        if loss(new, new_r) < loss(theta, r):
            done = float(np.abs(new - theta).max()) < 1e-5
            theta, r, damping = new, new_r, damping / 3
            if done:
                break
        elif damping > 1e6:
            break
        else:
            damping *= 5
    return replace(start, **dict(zip(names, np.exp(theta).tolist(), strict=True)))


def _jacobian(
    residuals: Callable[[Floats], Floats], theta: Floats, r: Floats, step: float = 1e-5
) -> Floats:
    moved = [theta + step * (np.arange(len(theta)) == k) for k in range(len(theta))]
    return np.stack([(residuals(point) - r) / step for point in moved], axis=1)


def _log_measured(runs: Sequence[MeasuredRun]) -> Floats:
    return np.log(np.array([run.step_s for run in runs]))


def calibrated_speed(logs: Floats, between: float, within: float) -> float:
    """Return the factor by which own runs with these log errors change predicted step times.

    The mean error of few runs is shrunk towards 0 by what is known about other sources, unless it
    is far larger than theirs.

    >>> round(calibrated_speed(np.array([-0.1]), between=0.1, within=0.05), 3)
    1.083
    """
    mean, noise = float(np.mean(logs)), within**2 / len(logs)
    prior = max(between**2, mean**2 - noise)
    return math.exp(-mean * prior / (prior + noise))


def calibrate(fitted: FittedModel, runs: Sequence[MeasuredRun]) -> FittedModel:
    """Return the model with the speed of the user's own runs."""
    if not runs:
        raise DataError("no run to calibrate with", hint="give at least one measured run")
    logs = log_errors(runs, fitted.constants)
    kind = "moe" if any(run.is_moe for run in runs) else "dense"
    factor = calibrated_speed(logs, *fitted.spreads[kind])
    constants = replace(fitted.constants, speed=fitted.constants.speed * factor)
    return replace(fitted, constants=constants)
