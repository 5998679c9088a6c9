"""Does the alarm of `ingot.forecast.alarm` come before runs diverge, and how often for nothing?

    python -m benchmarks.forecast_alarm DIRECTORY DIRECTORY
    python -m benchmarks.forecast_alarm DIRECTORY --shipped
    python -m benchmarks.forecast_alarm DIRECTORY --respond digits

reads the runs of `benchmarks/forecast_runs.py`, with and without `--diverging`, learns the hazard
that the package ships, and writes benchmarks/results/forecast_alarm.csv: recall at one false alarm
in 1,000 steps, of the hazard and of each feature alone, for runs of data that were left out in
learning. Ramps of the learning rate and other divergences are apart. "carried" uses the threshold
of the other data.

`--shipped` judges the hazard that the package ships, by runs that it was not learned from, and
writes benchmarks/results/forecast_alarm_shipped.csv. "carried" uses its own threshold.

`--respond` trains the runs of a kind of data that diverge again, with forecast.alarm = "lower_lr",
and with a good learning rate, and prints their final validation losses. The hazard is that of the
other data.
"""

# pyright: basic
from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.forecast_runs import PACKAGE, read_all
from ingot.forecast import alarm
from ingot.forecast.alarm import AHEAD, FEATURES, PAUSE, Alarm, Hazard, StepFeatures
from ingot.training.forecast import ForecastConfig
from ingot.training.guard import Diverged
from ingot.training.recipe import Recipe
from ingot.training.trainer import Trainer

_MEDIAN, _LOST = 15, 0.3  # steps, share of the gain
_RATE = 1e-3  # false alarms in a step
_RIDGE = 1.0
_WARMUP = 10.0  # weight of the steps of a warm-up: to warn then is to warn every user
_GOOD = {"xor": 0.02, "digits": 0.003}  # learning rates of AdamW
_KINDS = {"sgd": 50.0, "lion": 0.1}  # of the others, relative to it
_COUNTED = 2 * AHEAD  # steps before a divergence in which an alarm counts


@dataclass(frozen=True)
class Watched:
    """Features of one run."""

    data: str
    ramp: bool
    steps: np.ndarray
    features: np.ndarray
    event: int | None
    """Step at which it diverges."""
    warmup: int
    """Steps of warm-up; 0 for a ramp."""

    @property
    def label(self) -> np.ndarray:
        """Whether it diverges within the steps ahead."""
        if self.event is None:
            return np.zeros(len(self.steps), dtype=bool)
        return self.event - self.steps <= AHEAD


def find_event(losses: np.ndarray) -> int | None:
    """Return the step, from 1, at which a run diverges.

    >>> find_event(np.concatenate([np.linspace(4, 2, 100), np.full(50, 3.5)]))
    101
    >>> find_event(np.linspace(4, 2, 100))
    """
    first, best = float(np.median(losses[:5])), np.inf
    for at in range(len(losses) - _MEDIAN + 1):
        value = float(np.median(losses[at : at + _MEDIAN]))
        if not np.isfinite(value):
            return int(at + np.flatnonzero(~np.isfinite(losses[at : at + _MEDIAN]))[0] + 1)
        best = min(best, value)
        gain = max(first - best, 0.05 * first)
        if value - best > _LOST * gain:
            threshold = best + _LOST * gain
            return int(at + np.flatnonzero(losses[at : at + _MEDIAN] > threshold)[0] + 1)
    return None


def watch_all(out: Path) -> dict[str, Watched]:
    """Compute the features of all runs until they diverge."""
    found: dict[str, Watched] = {}
    for name, (recipe, lines) in read_all(out).items():
        steps = [line for line in lines if "loss" in line]
        event = find_event(np.array([line["loss"] for line in steps], dtype=float))
        if len(steps) < recipe.steps and event is None:
            event = len(steps) + 1
        features = StepFeatures(lambda s, r=recipe: r.schedule.lr_factor(s, r.steps))
        rows = [(line["step"], features.add(line)) for line in steps]
        kept = [(s, f) for s, f in rows if f is not None and (event is None or s < event)]
        if kept:
            numbers, values = zip(*kept, strict=True)
            ramp = recipe.schedule.warmup_steps == recipe.steps
            data = name.partition("-")[0]
            warmup = 0 if ramp else recipe.schedule.warmup_steps
            found[name] = Watched(data, ramp, np.array(numbers), np.array(values), event, warmup)
    return found


def learn(runs: list[Watched]) -> Hazard:
    """Fit the logistic model by Newton's method, and choose its threshold."""
    features = np.concatenate([run.features for run in runs])
    labels = np.concatenate([run.label for run in runs]).astype(float)
    mean, deviation = features.mean(0), features.std(0) + 1e-6
    x = np.column_stack([np.ones(len(features)), (features - mean) / deviation])
    warm = np.concatenate([run.steps <= run.warmup for run in runs])
    counts = np.where(warm & (labels == 0), _WARMUP, 1.0)
    w = np.zeros(x.shape[1])
    penalty = np.diag([0.0, *[_RIDGE] * len(FEATURES)])
    for _ in range(30):
        p = 1 / (1 + np.exp(-np.clip(x @ w, -50, 50)))
        gradient = x.T @ (counts * (p - labels)) + penalty @ w
        hessian = (x * (counts * p * (1 - p))[:, None]).T @ x + penalty
        w -= np.linalg.solve(hessian, gradient)
    hazard = Hazard(mean, deviation, w[1:], float(w[0]), 1.0)
    threshold = choose_threshold(runs, [score(hazard, run) for run in runs])
    return Hazard(mean, deviation, w[1:], float(w[0]), threshold)


def score(hazard: Hazard, run: Watched) -> np.ndarray:
    """Return the hazard at each of the steps of a run."""
    return np.array([hazard.probability(row) for row in run.features])


def alarms(run: Watched, scores: np.ndarray, threshold: float) -> Iterator[int]:
    """Yield the steps of the alarms, with pauses."""
    last = -PAUSE
    for step in run.steps[scores >= threshold].tolist():
        if step - last >= PAUSE:
            last = step
            yield step


def rate(runs: list[Watched], scores: list[np.ndarray], threshold: float) -> float:
    """Return the false alarms in a step: those that no divergence follows."""
    false = sum(
        run.event is None or run.event - step > _COUNTED
        for run, values in zip(runs, scores, strict=True)
        for step in alarms(run, values, threshold)
    )
    return false / sum(int(run.steps[-1]) for run in runs)


def choose_threshold(runs: list[Watched], scores: list[np.ndarray]) -> float:
    """Return the lowest threshold with at most one false alarm in 1,000 steps."""
    levels = np.unique(np.quantile(np.concatenate(scores), np.linspace(0.5, 1, 400)))
    return next((float(v) for v in levels if rate(runs, scores, v) <= _RATE), float(levels[-1]))


def recall(
    runs: list[Watched], scores: list[np.ndarray], threshold: float, ahead: int
) -> tuple[float, int]:
    """Return the share of divergences with an alarm that much before, and their number."""
    hits = [
        any(ahead <= run.event - step <= _COUNTED for step in alarms(run, values, threshold))
        for run, values in zip(runs, scores, strict=True)
        if run.event is not None
    ]
    return (float(np.mean(hits)) if hits else float("nan")), len(hits)


def learn_without(runs: list[Watched]) -> dict[str, Hazard]:
    """Learn a hazard for each kind of data from the runs of the others."""
    kinds = sorted({run.data for run in runs})
    return {kind: learn([run for run in runs if run.data != kind]) for kind in kinds}


def judge(runs: list[Watched], hazards: Mapping[str, Hazard]) -> Iterator[dict[str, object]]:
    """Yield the recall of the hazard of each kind of data, and of each feature."""
    carried = [score(hazards[run.data], run) / hazards[run.data].threshold for run in runs]
    methods = {"hazard": [score(hazards[run.data], run) for run in runs]}
    methods |= {name: [run.features[:, i] for run in runs] for i, name in enumerate(FEATURES)}
    for data in (*hazards, "all"):
        chosen = [i for i, run in enumerate(runs) if data in ("all", run.data)]
        own = [runs[i] for i in chosen]
        for method, values in methods.items():
            scores = [values[i] for i in chosen]
            row = _row(own, scores, choose_threshold(own, scores))
            yield {"data": data, "method": method, **row}
        row = _row(own, [carried[i] for i in chosen], 1.0)
        yield {"data": data, "method": "hazard, carried", **row}


def _row(runs: list[Watched], scores: list[np.ndarray], threshold: float) -> dict[str, object]:
    row: dict[str, object] = {"false alarms in 1,000 steps": 1000 * rate(runs, scores, threshold)}
    for kind, flag in (("ramp", True), ("natural", False)):
        kept = [i for i, run in enumerate(runs) if run.ramp is flag]
        for ahead in (1, 5, 10):
            part = [runs[i] for i in kept], [scores[i] for i in kept]
            share, events = recall(*part, threshold, ahead)
            row[f"{kind} events"] = events
            row[f"{kind} {ahead} ahead"] = share
    return row


def respond(out: Path, data: str) -> None:
    """Train the diverging runs with alarms that lower the rate, and with a good rate."""
    watched, recipes = watch_all(out), read_all(out)
    hazard = learn([run for run in watched.values() if run.data != data])
    for name, run in watched.items():
        if run.data == data and run.event is not None:
            recipe = recipes[name][0]
            good = _GOOD[data] * _KINDS.get(recipe.optimizer.kind, 1.0)
            lowered = replace(recipe, forecast=ForecastConfig(alarm="lower_lr"))
            tuned = replace(recipe, optimizer=replace(recipe.optimizer, lr=good))
            losses = [_train(r, hazard) for r in (recipe, lowered, tuned)]
            kind = "ramp" if run.ramp else "natural"
            print(name, kind, run.event, *(f"{loss:.4g}" for loss in losses), flush=True)  # noqa: T201


def _train(recipe: Recipe, hazard: Hazard) -> float:
    """Return the final validation loss."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        trainer = Trainer(recipe, Path(temporary))
        watch = Alarm(hazard, lambda step: recipe.schedule.lr_factor(step, recipe.steps))

        def act(line: dict[str, Any]) -> None:
            if watch.add(line) and recipe.forecast.alarm == "lower_lr":
                trainer.ask("lower_lr")

        try:
            result = trainer.run(act)
        except Diverged:
            result = None
    return float("inf") if result is None else result.loss


def main() -> None:
    """Learn the hazard of the package and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directories", type=Path, nargs="+")
    parser.add_argument("--shipped", action="store_true")
    parser.add_argument("--respond", choices=list(_GOOD))
    arguments = parser.parse_args()
    if arguments.respond:
        respond(arguments.directories[0], arguments.respond)
        return
    runs = [run for out in arguments.directories for run in watch_all(out).values()]
    results = Path(__file__).parent / "results"
    if arguments.shipped:
        hazards = dict.fromkeys(sorted({run.data for run in runs}), Hazard.load())
        write(judge(runs, hazards), results / "forecast_alarm_shipped.csv")
        return
    learn(runs).save(PACKAGE / alarm.NAME)
    write(judge(runs, learn_without(runs)), results / "forecast_alarm.csv")


def write(rows: Iterable[dict[str, object]], path: Path) -> None:
    """Write the table with three digits."""
    found = list(rows)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]), lineterminator="\n")
        writer.writeheader()
        for row in found:
            writer.writerow({k: f"{v:.3g}" if isinstance(v, float) else v for k, v in row.items()})


if __name__ == "__main__":
    main()
