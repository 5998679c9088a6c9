from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.core import config
from ingot.core.errors import DataError
from ingot.forecast.forecaster import Forecaster
from ingot.forecast.learned import Learned
from ingot.forecast.runs import RunLibrary
from ingot.observe.history import FORECASTS, read_forecasts
from ingot.training.recipe import Recipe
from ingot.workflows import forecast as workflow
from ingot.workflows.forecast import LiveForecast, describe_forecast, forecast, load_forecaster
from tests.training.runs import xor

STEPS = 200
FORECASTER = Forecaster(RunLibrary.load(), Learned.load())


def lines(count: int, drop: float = 0.5) -> list[dict[str, Any]]:
    return [
        {"step": s, "loss": 0.1 + s**-drop, "seconds": 0.5, "num_rows": 4}
        for s in range(1, count + 1)
    ]


def write(directory: Path, found: list[dict[str, Any]], recipe: Recipe | None = None) -> Path:
    directory.mkdir(parents=True)
    config.save(recipe or xor(steps=STEPS), directory / "recipe.toml")
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return directory


def test_a_run_is_forecast_from_what_it_has(tmp_path: Path) -> None:
    found = forecast(write(tmp_path / "run", lines(100)), forecaster=FORECASTER)
    assert found.forecast is not None
    assert (found.step, found.steps, found.truth) == (100, STEPS, None)
    assert [past.percent for past in found.past] == [20, 40]
    assert found.seconds_per_step == 0.5
    value, low, high = found.forecast.end
    assert low < value < high


def test_past_forecasts_did_not_see_what_came(tmp_path: Path) -> None:
    running = forecast(write(tmp_path / "run", lines(100)), forecaster=FORECASTER)
    finished = forecast(write(tmp_path / "finished", lines(STEPS)), forecaster=FORECASTER)
    assert finished.forecast is None
    assert finished.truth == pytest.approx(0.1 + 199**-0.5, rel=0.01)
    assert [past.percent for past in finished.past] == [20, 40, 60, 80]
    for one, other in zip(running.past, finished.past, strict=False):
        assert one.forecast.end == other.forecast.end


def test_what_if_the_rate_fell_now_or_the_run_was_longer(tmp_path: Path) -> None:
    directory = write(tmp_path / "run", lines(100))
    decayed = forecast(directory, decay_now=50, forecaster=FORECASTER)
    longer = forecast(directory, steps=1000, forecaster=FORECASTER)
    assert (decayed.steps, longer.steps) == (150, 1000)
    assert decayed.forecast is not None
    assert decayed.forecast.bin_steps[-1] == 150
    assert longer.forecast is not None
    with pytest.raises(DataError, match="two different questions"):
        forecast(directory, steps=500, decay_now=5, forecaster=FORECASTER)
    with pytest.raises(DataError, match="more than the 100 that are done"):
        forecast(directory, steps=100, forecaster=FORECASTER)


def test_the_planned_rate_of_a_decay_is_that_so_far_and_then_a_line() -> None:
    steps, factor = workflow._plan(xor(steps=STEPS), 100, None, 50)
    own = xor(steps=STEPS).schedule.lr_factor
    assert factor(30, steps) == own(30, STEPS)
    assert factor(100, steps) == pytest.approx(own(100, STEPS))
    assert factor(125, steps) == pytest.approx(own(100, STEPS) / 2)


def test_runs_without_a_forecast_say_why(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no steps yet"):
        forecast(write(tmp_path / "new", []))
    with pytest.raises(DataError, match="at least 20 of 200 steps"):
        forecast(write(tmp_path / "short", lines(10)))
    broken = [*lines(60), {"step": 61, "loss": math.nan}, *lines(100)[61:]]
    with pytest.raises(DataError, match="not finite after 30 %"):
        forecast(write(tmp_path / "broken", broken))
    with pytest.raises(DataError, match="at least 50 steps"):
        forecast(write(tmp_path / "tiny", lines(5), xor(steps=10)))


def test_own_finished_runs_join_the_library(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    place = tmp_path / "ingot/runs"
    shipped = len(RunLibrary.load())
    assert len(load_forecaster().library) == shipped
    done = write(place / "done", lines(STEPS))
    write(place / "running", lines(50))
    write(place / "tiny", lines(10), xor(steps=10))
    (write(place / "odd", lines(STEPS)) / "recipe.toml").write_text("[")
    assert len(load_forecaster().library) == shipped + 1
    assert len(load_forecaster(without=done).library) == shipped


def test_live_forecasts_are_those_of_the_finished_metrics(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(workflow, "_FIRST_S", 0.0)
    monkeypatch.setattr(workflow, "_MAX_SHARE", 1.0)
    directory = write(tmp_path / "run", lines(STEPS))
    live = LiveForecast(xor(steps=STEPS), directory)
    made = [found for line in lines(STEPS) if (found := live.add(line))]
    assert [found["step"] for found in made] == list(range(20, STEPS, 4))
    later = [past.forecast for past in forecast(directory).past]
    by_step = {found["step"]: found["forecast"] for found in made}
    assert [by_step[past.step] for past in later] == [past.end[0] for past in later]
    rows = read_forecasts(directory)
    assert [row["step"] for row in rows] == list(by_step)
    assert rows[0]["low"] < rows[0]["end"] < rows[0]["high"]


def test_a_resumed_run_is_forecast_from_all_its_lines(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(workflow, "_FIRST_S", 0.0)
    directory = write(tmp_path / "run", lines(100))
    live = LiveForecast(xor(steps=STEPS), directory)
    (directory / FORECASTS).write_text('{"step": 96}\n{"step": 104}\n{"st')
    live.resume(100)
    assert read_forecasts(directory) == [{"step": 96}]
    found = next(f for line in lines(STEPS)[100:] if (f := live.add(line)))
    assert found["step"] == 104


def test_forecasts_take_little_time_and_short_runs_have_none(tmp_path: Path) -> None:
    live = LiveForecast(xor(steps=STEPS), tmp_path)
    assert not any(live.add(line) for line in lines(STEPS))
    assert not (tmp_path / FORECASTS).exists()
    tiny = LiveForecast(xor(steps=10), tmp_path)
    assert not any(tiny.add(line) for line in lines(10))


def test_a_forecast_in_a_line(tmp_path: Path) -> None:
    found = forecast(write(tmp_path / "run", lines(100)), forecaster=FORECASTER).forecast
    assert found is not None
    value, _, _ = found.end
    assert describe_forecast(found).startswith(f"end {value:.4g} (")
    assert "not within this run" in describe_forecast(found, 1e-6)
    assert "at step" in describe_forecast(found, value * 1.01, 2.0)
    refused = replace(found, refusal="nothing like it")
    assert describe_forecast(refused) == "no forecast: nothing like it"
