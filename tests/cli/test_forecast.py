from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.forecast import forecast
from ingot.core.errors import IngotError
from tests.cli.conftest import Run
from tests.workflows.test_forecast import STEPS, lines, write


def test_a_forecast_is_shown(cli: Run, tmp_path: Path) -> None:
    run = write(tmp_path / "run", lines(100))
    found = cli("forecast", str(run), "--target", "0.2", XDG_DATA_HOME=str(tmp_path), COLUMNS="100")
    assert found.returncode == 0, found.stderr
    for text in ("at the end", "80 % band", "0.2 at step", "nearest runs", "40 %", "so far"):
        assert text in found.stdout
    missing = cli("forecast", "nothing", XDG_DATA_HOME=str(tmp_path))
    assert missing.returncode == 2
    assert "ingot runs" in missing.stderr


def test_json_output(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    forecast(str(write(tmp_path / "run", lines(100))), target=0.2, json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["forecast"]["low"] < found["forecast"]["end"] < found["forecast"]["high"]
    assert sum(found["forecast"]["weights"].values()) == pytest.approx(1.0, abs=1e-3)
    assert found["arrival"]["step"] > 100
    assert [past["percent"] for past in found["past"]] == [20, 40]


def test_finished_runs_show_what_came(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    forecast(str(write(tmp_path / "run", lines(STEPS))))
    shown = capsys.readouterr().out
    assert "the run is finished" in shown
    assert "what came" in shown


def test_the_newest_run_of_a_name_is_found(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    write(tmp_path / "ingot/runs/20261101-000000-xor", lines(100))
    forecast("xor", json=True)
    assert json.loads(capsys.readouterr().out)["run"].endswith("20261101-000000-xor")


def test_a_target_below_zero_is_an_error() -> None:
    with pytest.raises(IngotError, match="above 0"):
        forecast("run", target=0.0)
