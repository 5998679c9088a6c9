from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ingot.cli.runs import runs
from ingot.core.errors import IngotError
from tests.cli.conftest import Run
from tests.observe.fake_runs import LINES, run
from tests.workflows.test_forecast import STEPS, lines, write


def test_runs_are_listed_and_compared(cli: Run, tmp_path: Path) -> None:
    made = tmp_path / "ingot/runs"
    for name, lr in (("one", 0.1), ("[bold]two", 0.2)):
        run(made / name, LINES, optimizer={"lr": lr})
    found = cli("runs", XDG_DATA_HOME=str(tmp_path), COLUMNS="120")
    assert found.returncode == 0, found.stderr
    assert "one" in found.stdout
    assert "[bold]two" in found.stdout
    assert "4/4" in found.stdout
    assert "optimizer.lr" not in found.stdout
    plot = tmp_path / "losses.png"
    named = cli("runs", str(made / "one"), str(made / "[bold]two"), "--plot", str(plot))
    assert "optimizer.lr" in named.stdout
    assert plot.stat().st_size > 1000


def test_json_output(tmp_path: Path, capsys: Any) -> None:
    run(tmp_path / "one", LINES)
    runs((tmp_path,), json=True)
    (found,) = json.loads(capsys.readouterr().out)
    assert found["run"] == str(tmp_path / "one")
    assert (found["loss"], found["best_validation_loss"]) == (2.0, 2.5)
    assert found["recipe"]["steps"] == 4


def test_no_runs_is_not_an_error(cli: Run, tmp_path: Path) -> None:
    found = cli("runs", XDG_DATA_HOME=str(tmp_path))
    assert found.returncode == 0
    assert "`ingot train` starts one" in found.stdout
    with pytest.raises(IngotError, match="no such directory"):
        runs((tmp_path / "missing",))


def test_runs_that_are_not_finished_have_a_forecast(tmp_path: Path, capsys: Any) -> None:
    write(tmp_path / "running", lines(100))
    write(tmp_path / "short", lines(5))
    write(tmp_path / "finished", lines(STEPS))
    runs((tmp_path,), json=True)
    found = {Path(row["run"]).name: row["forecast"] for row in json.loads(capsys.readouterr().out)}
    assert found["running"]["low"] < found["running"]["end"] < found["running"]["high"]
    assert (found["short"], found["finished"]) == (None, None)
    runs((tmp_path,))
    shown = capsys.readouterr().out
    assert "forecast" in shown
