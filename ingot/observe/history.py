"""The history of a run, read from its directory.

    recipe.toml         the configuration
    environment.json    hardware and versions
    metrics.jsonl       a line for every step and evaluation
    forecast.jsonl      forecasts of the final loss, made while the run trained

The run may still be in progress, may have been killed, or may come from an untrusted source: values
that are not numbers are ignored. Where a run was rolled back or resumed, the last line of a step
counts.
"""

# pyright: basic
from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.errors import DataError
from ingot.observe import metrics

RECIPE, ENVIRONMENT = "recipe.toml", "environment.json"
FORECASTS = "forecast.jsonl"
_TAIL = 20
_TEXT = ("text", "chat", "preference")
_MAX_BYTES = 2**30  # of metrics: 5 million steps


@dataclass(frozen=True)
class Curve:
    """Values of a metric by step."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float | None:
        """Last value; None if the curve is empty."""
        return float(self.values[-1]) if len(self) else None


@dataclass(frozen=True)
class RunHistory:
    """Recipe, environment and metrics of one run."""

    directory: Path
    recipe: dict[str, Any]
    environment: dict[str, Any]
    lines: list[dict[str, Any]]
    updated: float
    """Time at which the last line was written, in seconds since 1970."""

    @classmethod
    def read(cls, directory: Path) -> RunHistory:
        """Read the run in a directory."""
        path = directory / metrics.NAME
        try:
            recipe = tomllib.loads((directory / RECIPE).read_text())
            environment = _read_json(directory / ENVIRONMENT)
            status = path.stat() if path.exists() else None
            if status and status.st_size > _MAX_BYTES:
                raise ValueError(
                    f"{path}: must be at most {_MAX_BYTES:,} bytes, got {status.st_size:,}"
                )
            lines = metrics.read(directory) if status else []
        except (OSError, ValueError) as error:
            raise DataError(
                f"{directory}: the run cannot be read: {error}"[:300],
                hint="name a directory that `ingot train` created",
            ) from error
        valid = [line for line in lines if isinstance(line, dict) and _is_step(line.get("step"))]
        updated = status.st_mtime if status else directory.stat().st_mtime
        return cls(directory, recipe, environment, valid, updated)

    @property
    def name(self) -> str:
        """Name of the recipe."""
        return str(self.recipe.get("name", self.directory.name))

    @property
    def step(self) -> int:
        """Number of steps done."""
        return max((line["step"] for line in self.lines), default=0)

    @property
    def steps(self) -> int:
        """Number of steps of the recipe."""
        steps: Any = self.recipe.get("steps")
        return steps if _is_step(steps) else 0

    @property
    def unit(self) -> str:
        """Unit of a row: tokens or samples."""
        data = self.recipe.get("data")
        text = isinstance(data, dict) and data.get("kind") in _TEXT
        return "tokens" if text else "samples"

    def curve(self, key: str) -> Curve:
        """Return the values of a metric; those that are not finite are left out."""
        return _curve({line["step"]: line[key] for line in self.lines if _is_number(line.get(key))})

    def objective_metrics(self) -> list[str]:
        """Return the names of the metrics that belong to the objective, such as those of DPO."""
        names = dict.fromkeys(key for line in self.lines for key in line if "/" in key)
        return [name for name in names if not name.startswith("validation_")]

    def rates(self) -> Curve:
        """Return the rows per second."""
        return _curve(
            {
                line["step"]: line["num_rows"] / line["seconds"]
                for line in self.lines
                if _is_number(line.get("num_rows"))
                and _is_number(line.get("seconds"))
                and line["seconds"]
            }
        )

    def forecasts(self) -> dict[str, Curve]:
        """Return the final loss forecast at each step, "end", and its band, "low" and "high"."""
        keys = ("end", "low", "high")
        rows = [
            r for r in read_forecasts(self.directory) if all(_is_number(r.get(k)) for k in keys)
        ]
        return {key: _curve({row["step"]: row[key] for row in rows}) for key in keys}

    def skipped_steps(self) -> list[tuple[int, str]]:
        """Return the steps whose update was skipped, with the reasons."""
        return [(line["step"], str(line["skipped"])) for line in self.lines if "skipped" in line]

    def summary(self) -> dict[str, Any]:
        """Return the main numbers of the run; None for those it does not have.

        `loss` is the median of the last 20 steps, `seconds` the total time of the steps and
        `data_wait_fraction` the fraction of it that was spent waiting for data.
        """
        loss, validation = self.curve("loss"), self.curve("validation_loss")
        rates, seconds = self.rates(), self.curve("seconds")
        data_wait = self.curve("data_seconds").values.sum() / max(seconds.values.sum(), 1e-9)
        return {
            "step": self.step,
            "steps": self.steps,
            "loss": float(np.median(loss.values[-_TAIL:])) if len(loss) else None,
            "validation_loss": validation.last,
            "best_validation_loss": float(validation.values.min()) if len(validation) else None,
            "accuracy": self.curve("accuracy").last,
            "rows_per_s": float(np.median(rates.values)) if len(rates) else None,
            "seconds": float(seconds.values.sum()),
            "data_wait_fraction": float(data_wait),
            "skipped": len(self.skipped_steps()),
        }


def read_forecasts(directory: Path) -> list[dict[str, Any]]:
    """Read the forecasts that a run made while it trained; lines that are none are left out."""
    path, rows = directory / FORECASTS, list[dict[str, Any]]()
    if not path.exists() or path.stat().st_size > _MAX_BYTES:
        return rows
    for line in path.read_text().splitlines():
        with suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and _is_step(row.get("step")):
                rows.append(row)
    return rows


def find_runs(places: Iterable[Path]) -> list[Path]:
    """List the runs among these directories and their children, by the time of their last start."""
    runs: set[Path] = set()
    for place in places:
        if (place / RECIPE).is_file():
            runs.add(place)
        elif place.is_dir():
            runs |= {path for path in place.iterdir() if (path / RECIPE).is_file()}
    return sorted(runs, key=lambda path: ((path / RECIPE).stat().st_mtime, path.name))


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a recipe with dotted keys.

    >>> flatten({"steps": 3, "optimizer": {"lr": 0.1}})
    {'steps': 3, 'optimizer.lr': 0.1}
    """
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differences(runs: Iterable[RunHistory]) -> dict[str, list[Any]]:
    """Return the keys whose values differ between the recipes, with the value of each run."""
    tables = [flatten(run.recipe) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    values = {key: [table.get(key) for table in tables] for key in keys}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


def _curve(values: dict[int, Any]) -> Curve:
    steps = sorted(values)
    return Curve(np.array(steps, dtype=np.int64), np.array([float(values[s]) for s in steps]))


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text()) if path.exists() else {}
    return content if isinstance(content, dict) else {}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)


def _is_step(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62
