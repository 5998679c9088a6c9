"""`ingot.train` does in Python what `ingot train` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ingot
from ingot.core import config
from ingot.core.errors import IngotError
from ingot.training.precision import Precision
from ingot.workflows.train import TrainingRun, export, find_run
from tests.training import runs


def test_a_recipe_object_is_trained_and_exported(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = []
    recipe = runs.text(tmp_path, precision=Precision.BF16)
    result = ingot.train(recipe, run_dir=tmp_path / "run", on_metrics=lines.append)
    assert result.finished
    assert result.steps == recipe.steps == lines[-1]["step"]
    assert result.metrics["validation_loss"] > 0
    assert result.model_dir is not None
    assert result.model_dir == tmp_path / "run/model"
    assert (tmp_path / "run/report.html").is_file()
    assert ingot.LLM(result.model_dir).generate("one model", max_tokens=3).token_ids


def test_a_stopped_run_resumes(tmp_path: Path) -> None:
    recipe = runs.xor(steps=40)
    run = TrainingRun(recipe, run_dir=tmp_path / "run")

    def stop(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 10:
            run.stop()

    stopped = run.train(stop)
    assert (stopped.finished, stopped.steps, stopped.model_dir) == (False, 10, None)
    assert "stopped" in (tmp_path / "run/report.html").read_text()
    result = ingot.train(recipe, run_dir=tmp_path / "run", resume=True)
    whole = ingot.train(recipe, run_dir=tmp_path / "whole")
    assert (result.finished, result.steps) == (True, 40)
    assert result.metrics == whole.metrics


def test_a_file_takes_overrides_and_a_recipe_object_does_not(tmp_path: Path) -> None:
    recipe = runs.xor(steps=2)
    config.save(recipe, tmp_path / "recipe.toml")
    result = ingot.train(tmp_path / "recipe.toml", ["steps=3"], run_dir=tmp_path / "run")
    assert result.steps == 3
    with pytest.raises(IngotError, match=r"dataclasses\.replace"):
        ingot.train(recipe, ["steps=3"], run_dir=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_the_newest_run_of_a_name_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    recipe = replace(runs.xor(steps=2), name="named")
    with pytest.raises(IngotError, match="no run of 'named'"):
        find_run("named")
    first, second = (ingot.train(recipe).run_dir for _ in range(2))
    assert first != second == find_run("named")
    with pytest.raises(IngotError, match="only decoders"):
        export(recipe, tmp_path / "out")
