"""The experiments of docs/forecast.md with a tiny budget."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import forecast_alarm, forecast_judge, forecast_rssm, forecast_runs
from benchmarks.forecast_alarm import Watched
from ingot.forecast.alarm import FEATURES, Hazard
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


def test_runs_become_a_library_and_features(trained: Path) -> None:
    found = forecast_runs.read_all(trained)
    assert list(found) == ["xor-0000", "xor-0001"]
    library = make_library(found.values())
    assert np.isfinite(library.log_loss["validation_loss"][0]).all()
    assert library.log_loss["loss"].shape == (2, BINS)
    healthy, _ = (forecast_alarm.watch_all(trained).get(name) for name in found)
    assert healthy is not None
    assert (healthy.data, healthy.event) == ("xor", None)
    assert healthy.features.shape == (len(healthy.steps), len(FEATURES))
    assert np.isfinite(healthy.features).all()


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


def watched(event: int | None, number: int, data: str = "xor") -> Watched:
    """A run whose first feature rises before it diverges."""
    steps = np.arange(20, event or 300, 5)
    features = np.random.default_rng(number).normal(size=(len(steps), len(FEATURES)))
    if event is not None:
        features[:, 0] += 8 * (event - steps <= 25)
    return Watched(data, number % 2 == 0, steps, features, event, warmup=0)


def test_a_hazard_is_learned_and_judged() -> None:
    kinds = ("xor", "digits")
    runs = [watched((None, 150)[n % 3 == 0], n, kinds[n % 2]) for n in range(24)]
    hazard = forecast_alarm.learn(runs)
    assert FEATURES[int(np.argmax(hazard.weight))] == FEATURES[0]
    rows = list(forecast_alarm.judge(runs, forecast_alarm.learn_without(runs)))
    (own,) = (r for r in rows if (r["data"], r["method"]) == ("all", "hazard"))
    assert own["ramp 5 ahead"] == own["natural 5 ahead"] == 1.0
    assert own["ramp events"] == sum(r.ramp and r.event is not None for r in runs)
    blind = Hazard(hazard.mean, hazard.deviation, 0 * hazard.weight, 0.0, 1.0)
    scores = [forecast_alarm.score(blind, run) for run in runs]
    assert forecast_alarm.recall(runs, scores, 0.9, ahead=5)[0] == 0.0


def test_a_hazard_is_judged_by_data_that_it_was_not_learned_from() -> None:
    runs = [watched((None, 150)[n % 3 == 0], n, ("xor", "digits")[n % 2]) for n in range(24)]
    shifted = np.roll(np.arange(len(FEATURES)), 1)  # what rises before digits diverge
    unlike = [
        replace(r, features=r.features[:, shifted]) if r.data == "digits" else r for r in runs
    ]
    rows = list(forecast_alarm.judge(unlike, forecast_alarm.learn_without(unlike)))
    (own,) = (r for r in rows if (r["data"], r["method"]) == ("digits", "hazard"))
    assert float(str(own["natural 5 ahead"])) < 0.5


def test_the_threshold_of_a_hazard_is_carried_over() -> None:
    runs = [watched((None, 150)[n % 3 == 0], n) for n in range(24)]
    hazard = forecast_alarm.learn(runs)
    for factor, caught in ((1.0, 1.0), (1e3, 0.0)):
        carried = replace(hazard, threshold=factor * hazard.threshold)
        rows = list(forecast_alarm.judge(runs, {"xor": carried}))
        (own,) = (r for r in rows if (r["data"], r["method"]) == ("all", "hazard, carried"))
        assert own["ramp 5 ahead"] == own["natural 5 ahead"] == caught


def test_a_divergence_is_found_and_noise_is_not() -> None:
    falling = np.linspace(4, 2, 100)
    noise = np.random.default_rng(0).normal(scale=0.3, size=100)
    assert forecast_alarm.find_event(falling + noise) is None
    assert forecast_alarm.find_event(np.r_[falling, np.full(30, 3.5)]) == 101
    assert forecast_alarm.find_event(np.r_[falling, np.inf, np.full(30, np.inf)]) == 101


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
    assert {row["method"] for row in read} == {"GRU", "RSSM", "weighted"}
    assert {row["setting"] for row in read} == {"known task", "unknown task"}
    assert all(float(row["mean"]) >= 0 for row in read)
