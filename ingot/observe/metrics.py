"""The metrics of a run: one line of JSON for each step and evaluation, in `metrics.jsonl`.

A line is written as soon as its step is done, so the file of a killed run is complete. When a run
is resumed from a checkpoint, the lines after the checkpoint are removed and written again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.core.paths import write_atomic

NAME = "metrics.jsonl"


class MetricsLog:
    """Writes the metrics of one run; of an existing file the first `lines` lines are kept.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> metrics = MetricsLog(directory)
    >>> metrics.add({"step": 1, "loss": 2.5})
    >>> read(directory)
    [{'step': 1, 'loss': 2.5}]
    >>> MetricsLog(directory, lines=0).lines
    0
    """

    def __init__(self, directory: Path, lines: int = 0) -> None:
        self._path = directory / NAME
        kept = self._path.read_text().splitlines()[:lines] if self._path.exists() else []
        write_atomic(self._path, "".join(f"{line}\n" for line in kept))
        self.lines = len(kept)

    def add(self, metrics: dict[str, Any]) -> None:
        """Append a line."""
        with self._path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
        self.lines += 1


def read(directory: Path) -> list[dict[str, Any]]:
    """Read the metrics of a run; an incomplete last line is left out."""
    lines: list[dict[str, Any]] = []
    for line in (directory / NAME).read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
    return lines
