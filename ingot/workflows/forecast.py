"""Forecast training runs: `forecast` a run directory, `LiveForecast` while a run trains.

The library of `ingot.forecast` is joined by the user's own finished runs: the newest ones in
`core.paths.runs()`.
"""

# pyright: basic
from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core import config, log, paths
from ingot.core.errors import DataError, IngotError
from ingot.core.paths import write_atomic
from ingot.forecast.curve import (
    BINS,
    CurveReader,
    Target,
    bin_lr,
    choose_target,
    read_curve,
)
from ingot.forecast.forecaster import Forecast, Forecaster
from ingot.forecast.judge import MIN_BINS
from ingot.forecast.learned import Learned
from ingot.forecast.runs import RunLibrary
from ingot.nn import DecoderConfig
from ingot.observe.history import FORECASTS, RECIPE, RunHistory, find_runs, read_forecasts
from ingot.observe.metrics import NAME as METRICS
from ingot.observe.report import duration
from ingot.training.recipe import Recipe

_MAX_OWN, _MAX_OWN_BYTES = 100, 2**24  # runs that join the library, and of their metrics
_PAST = (10, 20, 30, 40)  # bins at which past forecasts are shown
_MAX_SHARE = 0.005  # of the time of a run
_LOGGED = 10  # forecasts of a run that are logged
_FIRST_S = 10.0  # of a run, before its first forecast

LrFactor = Callable[[int, int], float]


def name_task(recipe: Recipe) -> str:
    """Name what a run learns: runs of one name are alike.

    >>> from ingot.nn import preset
    >>> from ingot.training.recipe import TextData
    >>> name_task(Recipe(name="a", steps=100, global_batch_size=1, data=TextData(source="stdlib"),
    ...                  model=preset("gpt2-124m")))
    'text/decoder 1e8'
    """
    model: Any = recipe.model
    if isinstance(model, DecoderConfig):
        size = round(math.log10(12 * model.layers * model.dim**2))
        return f"{recipe.data.kind}/decoder 1e{size}"
    return f"{recipe.data.kind}/{'other' if model is None else model.kind}"


def plan_lr(recipe: Recipe) -> np.ndarray:
    """Return the learning rate of each bin of a run."""
    return bin_lr(recipe.schedule.lr_factor, recipe.steps) * recipe.optimizer.lr


def make_library(runs: Iterable[tuple[Recipe, list[dict[str, Any]]]]) -> RunLibrary:
    """Make a library of runs from their recipes and lines of metrics."""
    tasks: list[str] = []
    lrs: list[np.ndarray] = []
    values: dict[Target, list[np.ndarray]] = {"loss": [], "validation_loss": []}
    for recipe, lines in runs:
        tasks.append(name_task(recipe))
        lrs.append(plan_lr(recipe))
        for target, rows in values.items():
            curve = read_curve(lines, lrs[-1], recipe.steps, target)
            rows.append(np.pad(curve.log_loss, (0, BINS - curve.now), constant_values=np.nan))
    shape = (len(tasks), BINS)
    log_loss: dict[Target, np.ndarray] = {t: np.reshape(v, shape) for t, v in values.items()}
    return RunLibrary(tuple(tasks), np.reshape(lrs, shape), log_loss)


def load_forecaster(without: Path | None = None) -> Forecaster:
    """Return a forecaster with the user's own finished runs, but without one of them."""
    library = RunLibrary.load()
    own: list[tuple[Recipe, list[dict[str, Any]]]] = []
    for path in reversed(find_runs([paths.runs()])):
        if len(own) == _MAX_OWN:
            break
        if without is None or path.resolve() != without.resolve():
            own += _read_finished(path)
    return Forecaster(library.add(make_library(own)) if own else library, Learned.load())


def _read_finished(path: Path) -> list[tuple[Recipe, list[dict[str, Any]]]]:
    """Return recipe and metrics of a finished run; nothing of another."""
    try:
        if (path / METRICS).stat().st_size > _MAX_OWN_BYTES:
            return []
        run, recipe = RunHistory.read(path), config.load(Recipe, path / RECIPE)
    except (OSError, IngotError):
        return []
    return [(recipe, run.lines)] if BINS <= recipe.steps == run.step else []


@dataclass(frozen=True)
class PastForecast:
    """A forecast that a run would have had earlier."""

    percent: int
    forecast: Forecast


@dataclass(frozen=True, kw_only=True)
class RunForecast:
    """What `forecast` returns."""

    run: RunHistory
    recipe: Recipe
    target: Target
    step: int
    steps: int
    """Planned steps, or those of the question."""
    loss: float
    """Latest loss."""
    forecast: Forecast | None
    """None if the run is finished."""
    past: list[PastForecast]
    truth: float | None
    """Final loss; None if the run is not finished."""

    @cached_property
    def seconds_per_step(self) -> float:
        """Median time of the latest steps."""
        seconds = self.run.curve("seconds").values[-200:]
        return float(np.median(seconds)) if len(seconds) else 0.0


def forecast(
    directory: Path,
    *,
    steps: int | None = None,
    decay_now: int | None = None,
    forecaster: Forecaster | None = None,
) -> RunForecast:
    """Forecast a run from its directory.

    Args:
        directory: The run.
        steps: Forecast it as if it was continued with this number of steps.
        decay_now: Forecast it as if its learning rate fell linearly to 0 within this number of
            steps from now.
        forecaster: By default that of `load_forecaster`.
    """
    run = RunHistory.read(directory)
    recipe = config.load(Recipe, directory / RECIPE)
    if not run.lines:
        raise DataError(f"{directory}: the run has no steps yet", hint="wait for its first steps")
    planned, factor = _plan(recipe, run.step, steps, decay_now)
    target = choose_target(recipe.eval_every, recipe.steps)
    lr = bin_lr(factor, planned) * recipe.optimizer.lr
    reader = CurveReader(lr, planned, target, name_task(recipe))
    for line in run.lines:
        reader.add(line)
    curve = reader.curve()
    _check_finite(directory, reader.bins, curve.now, target)
    found = forecaster or load_forecaster(without=directory)
    finished = curve.now == BINS
    return RunForecast(
        run=run,
        recipe=recipe,
        target=target,
        step=curve.step,
        steps=planned,
        loss=float(np.exp(curve.log_loss[-1])) if curve.now else math.nan,
        forecast=None if finished else found.forecast(curve),
        past=[
            PastForecast(100 * now // BINS, found.forecast(curve.prefix(now)))
            for now in _PAST
            if now < curve.now
        ],
        truth=float(np.exp(curve.log_loss[-1])) if finished else None,
    )


def _plan(
    recipe: Recipe, done: int, steps: int | None, decay_now: int | None
) -> tuple[int, LrFactor]:
    """Return the planned steps, and the factor of the learning rate by step."""
    schedule, own = recipe.schedule, recipe.steps
    if steps is not None and decay_now is not None:
        raise DataError("steps, decay_now: two different questions", hint="give one of them")
    if decay_now is not None:
        if decay_now < 1:
            raise DataError(f"decay_now: must be at least 1, got {decay_now}", hint="give steps")
        now = schedule.lr_factor(done, own)

        def decayed(step: int, _: int) -> float:
            left = (done + decay_now - step) / decay_now
            return schedule.lr_factor(step, own) if step < done else now * left

        return done + decay_now, decayed
    if steps is None:
        return own, schedule.lr_factor
    if steps <= done:
        raise DataError(
            f"steps: must be more than the {done} that are done, got {steps}",
            hint="give a larger number",
        )
    return steps, lambda step, _: schedule.lr_factor(step, own if step < done else steps)


def _check_finite(directory: Path, bins: int, now: int, target: Target) -> None:
    if now < bins and bins >= MIN_BINS:
        raise DataError(
            f"{directory}: the {target.replace('_', ' ')} is missing or not finite after "
            f"{100 * now // BINS} % of the run",
            hint="restart it with a lower learning rate, or with guard.policy=rollback",
        )


def describe_forecast(
    found: Forecast, goal: float | None = None, seconds_per_step: float = 0.0
) -> str:
    """Describe a forecast in a line; `goal` is a loss to reach.

    >>> forecaster = Forecaster(RunLibrary.load(), Learned.load())
    >>> lines = [{"step": s, "loss": 2 + 30 / s} for s in range(1, 501)]
    >>> curve = read_curve(lines, np.linspace(1.0, 0.0, BINS), steps=1000, target="loss")
    >>> describe_forecast(forecaster.forecast(curve)).split()[0]
    'end'
    """
    value, low, high = found.end
    if found.refusal:
        return f"no forecast: {found.refusal}"
    text = f"end {value:.4g} ({low:.4g} to {high:.4g})"
    if goal is not None:
        text += f"  {describe_arrival(found, goal, seconds_per_step)}"
    return f"{text}  from {found.earlier_runs:,} earlier runs"


def describe_arrival(found: Forecast, goal: float, seconds_per_step: float) -> str:
    """Describe when a loss is reached."""
    arrival = found.arrival(goal)
    if arrival.earliest is None or arrival.step is None:
        return f"{goal:.4g} not within this run"
    latest = "the end" if arrival.latest is None else f"{arrival.latest:,}"
    left = duration((arrival.step - found.step) * seconds_per_step)
    text = f"{goal:.4g} at step {arrival.step:,} ({arrival.earliest:,} to {latest}), in {left}"
    return text + (f", {arrival.probability:.0%} likely" if arrival.latest is None else "")


class LiveForecast:
    """Forecasts a run while it trains, for at most 0.5 % of its time.

    Each forecast is a line of `forecast.jsonl`, with the time at which it was made. It reads lines
    of metrics only, so the bits of training do not depend on it.
    """

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self.directory = directory
        self.goal = recipe.forecast.target_loss
        self._reader: CurveReader | None = None
        if recipe.steps >= BINS:
            target = choose_target(recipe.eval_every, recipe.steps)
            self._reader = CurveReader(plan_lr(recipe), recipe.steps, target, name_task(recipe))
        self._forecaster: Forecaster | None = None
        self._started = time.monotonic()
        self._spent, self._bins, self._logged = 0.0, 0, 0
        self._first_step: int | None = None

    def resume(self, step: int) -> None:
        """Read the metrics of a run up to this step; forecasts of later steps are removed."""
        if not step or self._reader is None:
            return
        for line in RunHistory.read(self.directory).lines:
            if line["step"] <= step:
                self._reader.add(line)
        self._bins = self._reader.bins
        if (path := self.directory / FORECASTS).exists():
            rows = read_forecasts(self.directory)
            write_atomic(path, "".join(json.dumps(r) + "\n" for r in rows if r["step"] <= step))

    def add(self, line: Mapping[str, Any]) -> dict[str, Any] | None:
        """Read a line; return a forecast as metrics if one is due."""
        if self._reader is None:
            return None
        self._reader.add(line)
        if self._first_step is None:
            self._first_step = line["step"]
        elapsed = time.monotonic() - self._started
        new = self._reader.bins > max(self._bins, MIN_BINS - 1)
        if not new or elapsed < _FIRST_S or self._spent > _MAX_SHARE * elapsed:
            return None
        self._bins = self._reader.bins
        start = time.monotonic()
        try:
            found = self._forecast()
        except IngotError as error:  # a forecast must not end a run
            log.logger(__name__).warning("no forecasts: %s", error.message)
            self._reader = found = None
        self._spent += time.monotonic() - start
        if found is None:
            return None
        value, low, high = found.end
        return {"step": found.step, "forecast": value, "forecast_low": low, "forecast_high": high}

    def _seconds_per_step(self, step: int) -> float:
        assert self._first_step is not None
        return (time.monotonic() - self._started) / max(step - self._first_step, 1)

    def _forecast(self) -> Forecast | None:
        assert self._reader is not None
        curve = self._reader.curve()
        if not MIN_BINS <= curve.now < BINS:
            return None
        if self._forecaster is None:
            self._forecaster = load_forecaster(without=self.directory)
        found = self._forecaster.forecast(curve)
        with (self.directory / FORECASTS).open("a") as file:
            file.write(json.dumps(record(found) | {"time": time.time()}) + "\n")
        if found.step * _LOGGED // found.steps > self._logged:
            self._logged = found.step * _LOGGED // found.steps
            text = describe_forecast(found, self.goal, self._seconds_per_step(found.step))
            log.logger(__name__).info("step %d of %d: %s", found.step, found.steps, text)
        return found


def record(found: Forecast) -> dict[str, Any]:
    """Return a forecast as values for JSON."""
    value, low, high = found.end
    return {
        "step": found.step,
        "steps": found.steps,
        "target": found.target,
        "end": value,
        "low": low,
        "high": high,
        "refusal": found.refusal,
        "weights": {name: round(weight, 4) for name, weight in found.weights.items()},
        "ends": found.ends,
        "earlier_runs": found.earlier_runs,
        "same_task": found.same_task,
        "path": {
            "steps": found.bin_steps,
            **{
                name: np.exp(values).round(6).tolist()
                for name, values in (
                    ("loss", found.path),
                    ("low", found.low),
                    ("high", found.high),
                )
            },
        },
    }
