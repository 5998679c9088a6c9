"""What became of a run, read from its directory.

    recipe.toml         what was to be done
    environment.json    on what
    metrics.jsonl       every step and evaluation

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.errors import DataError
from ingot.observe import metrics

RECIPE, ENVIRONMENT = "recipe.toml", "environment.json"
_TAIL = 20
_MOST = 2**30  # bytes of metrics: 5 million steps


@dataclass(frozen=True)
class Curve:
    """Numbers by step."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> float | None:
        """The last value; None if there is none."""
        return float(self.values[-1]) if len(self) else None


@dataclass(frozen=True)
class RunHistory:
    """One run."""

    directory: Path
    recipe: dict[str, Any]
    environment: dict[str, Any]
    lines: list[dict[str, Any]]
    updated: float
    """When its last line was written, in seconds since 1970."""

    @classmethod
    def read(cls, directory: Path) -> RunHistory:
        """The run in a directory."""
        path = directory / metrics.NAME
        try:
            recipe = tomllib.loads((directory / RECIPE).read_text())
            environment = _table(directory / ENVIRONMENT)
            status = path.stat() if path.exists() else None
            if status and status.st_size > _MOST:
                raise ValueError(f"{path} has {status.st_size / 1e9:.1f} GB")
            lines = metrics.read(directory) if status else []
        except (OSError, ValueError) as error:
            raise DataError(
                f"the run in {directory} cannot be read: {error}"[:300],
                hint="name the directory of a run that `ingot train` made",
            ) from error
        good = [line for line in lines if isinstance(line, dict) and _whole(line.get("step"))]
        updated = status.st_mtime if status else directory.stat().st_mtime
        return cls(directory, recipe, environment, good, updated)

    @property
    def name(self) -> str:
        """What its recipe is called."""
        return str(self.recipe.get("name", self.directory.name))

    @property
    def step(self) -> int:
        """The last step that was made."""
        return max((line["step"] for line in self.lines), default=0)

    @property
    def steps(self) -> int:
        """How many were to be made."""
        wanted: Any = self.recipe.get("steps")
        return wanted if _whole(wanted) else 0

    @property
    def unit(self) -> str:
        """What a row is."""
        data = self.recipe.get("data")
        text = isinstance(data, dict) and data.get("kind") == "text"
        return "tokens" if text else "samples"

    def curve(self, key: str) -> Curve:
        """The numbers of this name; those that are not finite are left out."""
        found = {line["step"]: line[key] for line in self.lines if _number(line.get(key))}
        return _curve(found)

    def rates(self) -> Curve:
        """Rows a second."""
        return _curve(
            {
                line["step"]: line["num_rows"] / line["seconds"]
                for line in self.lines
                if _number(line.get("num_rows"))
                and _number(line.get("seconds"))
                and line["seconds"]
            }
        )

    def skipped_steps(self) -> list[tuple[int, str]]:
        """Steps whose update was not made, and why."""
        return [(line["step"], str(line["skipped"])) for line in self.lines if "skipped" in line]

    def summary(self) -> dict[str, Any]:
        """The run in a few numbers: None is what it has not.

        `loss` is the median of the last 20 steps; `seconds` is of its steps alone.
        """
        loss, validation = self.curve("loss"), self.curve("validation_loss")
        rates, seconds = self.rates(), self.curve("seconds")
        waited = self.curve("data_seconds").values.sum() / max(seconds.values.sum(), 1e-9)
        return {
            "step": self.step,
            "steps": self.steps,
            "loss": float(np.median(loss.values[-_TAIL:])) if len(loss) else None,
            "validation_loss": validation.last,
            "best_validation_loss": float(validation.values.min()) if len(validation) else None,
            "accuracy": self.curve("accuracy").last,
            "rows_per_s": float(np.median(rates.values)) if len(rates) else None,
            "seconds": float(seconds.values.sum()),
            "data_seconds": float(waited),
            "skipped": len(self.skipped_steps()),
        }


def find_runs(places: Iterable[Path]) -> list[Path]:
    """The runs among these directories and right below them, by when they were last begun."""
    found: set[Path] = set()
    for place in places:
        if (place / RECIPE).is_file():
            found.add(place)
        elif place.is_dir():
            found |= {path for path in place.iterdir() if (path / RECIPE).is_file()}
    return sorted(found, key=lambda path: ((path / RECIPE).stat().st_mtime, path.name))


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A recipe by dotted keys.

    >>> flatten({"steps": 3, "optimizer": {"lr": 0.1}})
    {'steps': 3, 'optimizer.lr': 0.1}
    """
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def differences(runs: Iterable[RunHistory]) -> dict[str, list[Any]]:
    """The keys of their recipes that are not the same in all runs, and each run's value."""
    tables = [flatten(run.recipe) for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table)
    values = {key: [table.get(key) for table in tables] for key in keys}
    return {key: of for key, of in values.items() if any(value != of[0] for value in of)}


def _curve(found: dict[int, Any]) -> Curve:
    steps = sorted(found)
    return Curve(np.array(steps, dtype=np.int64), np.array([float(found[s]) for s in steps]))


def _table(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text()) if path.exists() else {}
    return found if isinstance(found, dict) else {}


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**62
