"""Directories of runs, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tomli_w

from ingot.observe.metrics import NAME


def run(directory: Path, lines: list[Any], **recipe: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    known = {"name": "made", "steps": 4, "data": {"kind": "xor"}, **recipe}
    (directory / "recipe.toml").write_text(tomli_w.dumps(known))
    (directory / "environment.json").write_text(json.dumps({"cpu": "<b>some</b>"}))
    (directory / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def step(number: int, loss: float, **more: Any) -> dict[str, Any]:
    known = {"step": number, "loss": loss, "lr": 0.1, "grad_norm": 1.0, "num_rows": 8}
    return {**known, "seconds": 0.5, "data_seconds": 0.125, **more}


LINES = [
    step(1, 4.0),
    step(2, 2.0),
    {"step": 2, "validation_loss": 2.5, "accuracy": 0.25},
    step(3, float("nan"), skipped="a loss of nan"),
    step(4, 1.0),
    {"step": 4, "validation_loss": 3.0, "accuracy": 0.5},
]
