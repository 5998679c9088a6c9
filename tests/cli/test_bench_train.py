from __future__ import annotations

import json
from pathlib import Path

import pytest

from ingot.bench import machine
from tests import models
from tests.bench.row import PEAKS
from tests.cli.conftest import Run


@pytest.fixture(autouse=True)
def given_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring them takes 12 seconds where they are not cached."""
    monkeypatch.setattr(machine, "peaks", lambda: PEAKS)


def test_step_of_the_eager_baseline(cli: Run, tmp_path: Path) -> None:
    directory = models.gpt2(tmp_path / "gpt2")
    size = ("--batch-size", "2", "--seq-len", "8", "--rounds", "1")
    command = ("bench", "train", "eager", "--model", str(directory), *size)
    result = cli(*command, "--json", "--results", str(tmp_path))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    (row,) = found["rows"]
    assert row["system"] == "eager"
    assert row["error"] is None
    assert row["tokens_per_s"] > 0
    assert row["peak_memory_bytes"] > 0
    assert row["roofline_fraction"] > 0
    assert found["summary"]["best_peer"] == "eager"
    assert found["header"]["peaks"]["matmul"]["bf16"]
    assert len((tmp_path / "train.csv").read_text().splitlines()) == 2


def test_wrong_system_suggests_the_right_one(cli: Run) -> None:
    result = cli("bench", "train", "eagre")
    assert result.returncode == 2
    assert "did you mean 'eager'" in result.stderr


def test_model_that_is_not_gpt2_is_rejected(cli: Run, tiny: Path) -> None:
    result = cli("bench", "train", "eager", "--model", str(tiny))
    assert result.returncode == 2
    assert "must be a GPT-2" in result.stderr
