"""The experiments of docs/forecast.md with a tiny budget."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import forecast_judge, forecast_rssm, forecast_runs
from ingot.forecast.curve import BINS
from ingot.training.optimizer import AdamWConfig
from ingot.training.recipe import Recipe
from ingot.workflows.forecast import make_library
from tests.forecast import libraries


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("family", ["xor", "digits", "text", "recurrent"])
@pytest.mark.parametrize("diverging", [False, True])
def test_recipes_follow_from_their_numbers(family: str, diverging: bool) -> None:
    drawn = [forecast_runs.draw(family, number, diverging) for number in range(20)]
    assert drawn == [forecast_runs.draw(family, number, diverging) for number in range(20)]
    assert len({recipe.optimizer.lr for recipe in drawn}) == 20
    assert any(recipe.schedule.warmup_steps == recipe.steps for recipe in drawn)


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: Any) -> Path:
    """Two short runs: one learns, one diverges."""

    def draw(family: str, number: int, diverging: bool = False) -> Recipe:
        recipe = _draw("xor", 0, diverging)
        lr = (0.01, 30.0)[number]
        optimizer = AdamWConfig(lr=lr, betas=(0.9, 0.95))
        return replace(recipe, steps=100, eval_every=2, optimizer=optimizer, seed=number)

    _draw = forecast_runs.draw
    monkeypatch.setattr(forecast_runs, "draw", draw)
    threads = torch.get_num_threads()
    for number in range(2):
        forecast_runs.train("xor", number, tmp_path, diverging=False)
    torch.set_num_threads(threads)
    return tmp_path


def test_runs_become_a_library(trained: Path) -> None:
    found = forecast_runs.read_all(trained)
    assert list(found) == ["xor-0000", "xor-0001"]
    library = make_library(found.values())
    assert np.isfinite(library.log_loss["validation_loss"][0]).all()
    assert library.log_loss["loss"].shape == (2, BINS)


def test_the_forecasts_are_judged(tmp_path: Path) -> None:
    tasks = tuple(f"{('text', 'digits', 'xor')[n % 3]}/dense" for n in range(24))
    library = replace(libraries.library(24), tasks=tasks)
    ramps, fresh = np.zeros(24, dtype=bool), np.arange(24) >= 12
    cases = list(forecast_judge.forecast_all(library, ramps, fresh))
    assert len(cases) == 2 * 12 * len(forecast_judge.NOWS)
    rows = list(forecast_judge.summarize(cases))
    forecast_judge.write(rows, tmp_path / "forecast.csv")
    read = read_csv(tmp_path / "forecast.csv")
    assert {row["setting"] for row in read} == {"known task", "unknown task"}
    best = {row["method"]: float(row["mean"]) for row in read if row["percent"] == "40"}
    assert best["weighted"] < best["last value"]


def test_gru_and_rssm_have_the_same_budget_and_learn() -> None:
    sizes = [forecast_rssm.count_weights(forecast_rssm.build(m)) for m in ("GRU", "RSSM")]
    assert abs(sizes[0] / sizes[1] - 1) < 0.02
    curves = forecast_rssm.Curves.of(libraries.library(32))
    for method in ("GRU", "RSSM"):
        untrained, trained = (forecast_rssm.train(method, curves, 1e-2, steps) for steps in (1, 40))
        before, after = (forecast_rssm.find_errors(m, curves, 20) for m in (untrained, trained))
        assert after.mean() < 0.7 * before.mean()


def test_forecasts_of_recurrent_models_do_not_see_what_came() -> None:
    curves = forecast_rssm.Curves.of(libraries.library(4))
    hidden = curves.log_loss.clone()
    hidden[:, 20:] = 9.0
    other = forecast_rssm.Curves(hidden, curves.actions)
    for method in ("GRU", "RSSM"):
        model = forecast_rssm.build(method)
        (one, _), (two, _) = (model(c.changes(20)[0], c.actions, 20, 0) for c in (curves, other))
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_gru_and_rssm_are_compared(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(forecast_rssm, "LEARNING_RATES", (3e-3,))
    rows = list(forecast_rssm.judge(libraries.library(24), steps=2))
    forecast_rssm.write(rows, tmp_path / "rssm.csv")
    read = read_csv(tmp_path / "rssm.csv")
    assert {row["method"] for row in read} == {"GRU", "RSSM"}
    assert {row["setting"] for row in read} == {"known task", "unknown task"}
    assert all(float(row["mean"]) >= 0 for row in read)
