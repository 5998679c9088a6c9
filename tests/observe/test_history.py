from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ingot.core.errors import DataError
from ingot.observe.history import RunHistory, differences, find_runs
from ingot.observe.metrics import NAME
from tests.observe.fake_runs import LINES, run, step


def test_a_run_in_numbers(tmp_path: Path) -> None:
    found = RunHistory.read(run(tmp_path / "a", LINES))
    assert (found.name, found.step, found.steps, found.unit) == ("made", 4, 4, "samples")
    assert found.summary() == {
        "step": 4,
        "steps": 4,
        "loss": 2.0,
        "validation_loss": 3.0,
        "best_validation_loss": 2.5,
        "accuracy": 0.5,
        "rows_per_s": 16.0,
        "seconds": 2.0,
        "data_wait_fraction": 0.25,
        "skipped": 1,
    }
    assert found.curve("loss").steps.tolist() == [1, 2, 4]
    assert found.skipped_steps() == [(3, "a loss of nan")]


def test_of_a_step_that_was_made_again_the_last_counts(tmp_path: Path) -> None:
    lines = [step(1, 4.0), step(2, 9.0), step(1, 3.0), step(2, 2.0)]
    loss = RunHistory.read(run(tmp_path, lines)).curve("loss")
    assert loss.values.tolist() == [3.0, 2.0]


def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    run(tmp_path, [])
    (tmp_path / NAME).unlink()
    found = RunHistory.read(tmp_path)
    assert found.summary()["loss"] is None
    assert found.step == 0


def test_nonsense_is_not_taken_for_numbers(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "loss": "low"},
        {"step": True, "loss": 1.0},
        {"step": -1, "loss": 1.0},
        {"step": 2, "loss": [1.0]},
        {"step": 3, "loss": 10**400},
        {"step": 4, "num_rows": 1, "seconds": 0},
        ["no line"],
        {"step": 5, "loss": 2.0},
    ]
    found = RunHistory.read(run(tmp_path, lines, steps="many"))
    assert found.curve("loss").values.tolist() == [2.0]
    assert len(found.rates()) == 0
    assert found.steps == 0


@pytest.mark.parametrize("wrong", ["recipe.toml", "environment.json"])
def test_what_cannot_be_read_is_said(tmp_path: Path, wrong: str) -> None:
    run(tmp_path, LINES)
    (tmp_path / wrong).write_bytes(b"\xff{")
    with pytest.raises(DataError, match="cannot be read"):
        RunHistory.read(tmp_path)


def test_runs_are_found(tmp_path: Path) -> None:
    first, second = run(tmp_path / "runs/b", LINES), run(tmp_path / "runs/a", LINES)
    os.utime(first / "recipe.toml", (1000, 1000))
    (tmp_path / "runs/other").mkdir()
    assert find_runs([tmp_path / "runs"]) == [first, second], "the newest last"
    assert find_runs([first, tmp_path / "runs/other", tmp_path / "missing"]) == [first]


def test_differences(tmp_path: Path) -> None:
    runs = [
        RunHistory.read(run(tmp_path / "a", [], optimizer={"lr": 0.1, "kind": "sgd"})),
        RunHistory.read(run(tmp_path / "b", [], optimizer={"lr": 0.2, "kind": "sgd"}, seed=1)),
    ]
    assert differences(runs) == {"optimizer.lr": [0.1, 0.2], "seed": [None, 1]}


def test_forecasts_are_read_and_other_lines_are_left_out(tmp_path: Path) -> None:
    made = run(tmp_path, LINES)
    good = {"step": 2, "end": 1.5, "low": 1.0, "high": 2.0}
    rows = [
        good,
        {"step": 3, "end": "1.5"},
        {"step": -1},
        ["step"],
        {**good, "step": 4, "end": 1.25},
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    (made / "forecast.jsonl").write_text(content + '{"step"')
    found = RunHistory.read(made).forecasts()
    assert found["end"].steps.tolist() == [2, 4]
    assert found["end"].values.tolist() == [1.5, 1.25]
    assert found["high"].last == 2.0
