"""The published runs, read once."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingot.planning.published import MeasuredRun, read_runs

DATA = Path(__file__).parents[2] / "benchmarks/plan"


@pytest.fixture(scope="session")
def runs() -> list[MeasuredRun]:
    return read_runs(DATA / "published_runs.csv")
