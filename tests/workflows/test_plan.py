from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from ingot.core import config
from ingot.core.errors import ConfigError, DataError, UnknownName
from ingot.planning.workload import SHAPES
from ingot.training.recipe import Recipe
from ingot.workflows.plan import (
    _is_runnable,
    apply,
    plan,
    read_own_runs,
    read_shape,
    recipe_keys,
    set_keys,
)
from tests.planning.conftest import DATA

RECIPE = Path(__file__).parents[2] / "recipes/gpt2-124m.toml"
ASKED = {"gpu": "h100", "gpus": 8, "seq_len": 8192, "global_batch_size": 128}


def test_models_are_names_presets_directories_and_recipes(tmp_path: Path) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 160, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_shape("llama3-8b") is SHAPES["llama3-8b"]
    assert read_shape("smollm2-135m").layers == 30
    assert read_shape(str(RECIPE)).dim == 768
    assert read_shape(str(tmp_path)) == read_shape(str(tmp_path / "config.json"))


def test_a_model_that_is_none_of_them_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="llama3-8b"):
        read_shape("llama3-8")
    with pytest.raises(ConfigError, match="not a recipe"):
        read_shape(str(tmp_path / "none.toml"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_shape(str(tmp_path))
    (tmp_path / "empty.toml").write_text("steps = 1")
    with pytest.raises(ConfigError, match=r"no \[model\] table"):
        read_shape(str(tmp_path / "empty.toml"))


def test_a_precision_that_the_gpu_lacks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="a100: has no matmuls in fp8"):
        plan("llama3-8b", **{**ASKED, "gpu": "a100"}, precision="fp8")  # pyright: ignore


def test_own_runs_of_a_table_change_the_prediction(tmp_path: Path) -> None:
    lines = (DATA / "published_runs.csv").read_text().splitlines()
    column = lines[0].split(",").index("source")
    own = [line for line in lines[1:] if line.split(",")[column] == "K"]
    (tmp_path / "own.csv").write_text("\n".join([lines[0], *own]) + "\n")
    before = plan("llama3-8b", **ASKED)  # pyright: ignore
    after = plan("llama3-8b", **ASKED, runs=tmp_path / "own.csv")  # pyright: ignore
    assert (before.own_runs, after.own_runs) == (0, 9)
    assert after.first.step_s != before.first.step_s
    assert after.first.interval != before.first.interval


def run_directory(parent: Path, seconds: list[float]) -> Path:
    """What `ingot train` leaves: recipe and metrics."""
    directory = parent / "20261101-120000-gpt2"
    directory.mkdir()
    (directory / "recipe.toml").write_text(RECIPE.read_text())
    (directory / "environment.json").write_text(json.dumps({"ranks": 2}))
    lines = [{"step": at + 1, "seconds": value} for at, value in enumerate(seconds)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_own_runs_of_ingot_are_measured_after_their_first_steps(tmp_path: Path) -> None:
    run_directory(tmp_path, [9.0, 9.0, 9.0, 0.5, 0.4, 0.6])
    [run] = read_own_runs(tmp_path, "h100")
    assert run.step_s == 0.5
    assert (run.plan.gpus, run.plan.fsdp, run.plan.recompute) == (2, 2, "full")
    assert (run.workload.seq_len, run.workload.global_batch_size) == (1024, 4)
    assert run.plan.micro_batch_size == 4


def test_a_place_without_runs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no run of `ingot train`"):
        read_own_runs(tmp_path, "h100")
    with pytest.raises(DataError, match="no step after the first 3"):
        read_own_runs(run_directory(tmp_path, [1.0]), "h100")


def test_the_keys_of_a_plan_go_into_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.read_text())
    report = plan(str(recipe), gpu="a100", gpus=4, seq_len=1024, global_batch_size=4)
    keys = apply(report, recipe)
    table = tomllib.loads(recipe.read_text())
    before = tomllib.loads(RECIPE.read_text())
    assert {name: table[name] for name in keys} == keys
    loaded = config.load(Recipe, recipe)
    loaded.check_ranks(4)
    assert loaded.batch_shards == 4
    assert {name: v for name, v in table.items() if name not in keys} == {
        name: v for name, v in before.items() if name not in keys
    }
    assert recipe.read_text().startswith(RECIPE.read_text().splitlines()[0])
    apply(report, recipe)
    assert tomllib.loads(recipe.read_text()) == table


def test_a_recipe_with_another_batch_is_not_changed(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.read_text())
    report = plan(str(recipe), gpu="a100", gpus=4, seq_len=1024, global_batch_size=8)
    with pytest.raises(ConfigError, match="global_batch_size is 4"):
        apply(report, recipe)
    assert recipe.read_text() == RECIPE.read_text()


def test_a_plan_that_the_trainer_cannot_run_is_not_applied(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    text = RECIPE.read_text().replace("global_batch_size = 4", "global_batch_size = 12")
    recipe.write_text(text)
    asked = {"gpu": "a100", "gpus": 12, "seq_len": 1024, "global_batch_size": 12}
    with pytest.raises(ConfigError, match="`ingot train` can run no plan that fits"):
        apply(plan(str(recipe), **asked), recipe)  # pyright: ignore
    assert recipe.read_text() == text


def test_the_trainer_decides_which_plans_it_can_run() -> None:
    """The recipe is in bfloat16, with tied embeddings, which a pipeline cannot have."""
    report = plan(str(RECIPE), gpu="a100", gpus=4, seq_len=1024, global_batch_size=4)
    runnable = {True: set[str](), False: set[str]()}
    for estimate in report.result.estimates:
        kind = "+".join(name for name in ("pp", "tp") if getattr(estimate.plan, name) > 1)
        runnable[_is_runnable(RECIPE, recipe_keys(estimate), 4)].add(kind)
    assert runnable[True] == {"", "tp"}
    assert "pp" in runnable[False]


def test_a_table_in_the_middle_is_replaced() -> None:
    text = "a = 1\n\n[parallel]\ntp = 8\n\n[model]\ndim = 8\n"
    assert tomllib.loads(set_keys(text, {"parallel": {"tp": 2}})) == {
        "a": 1,
        "model": {"dim": 8},
        "parallel": {"tp": 2},
    }


def test_a_key_of_a_table_is_not_taken_for_one_at_the_top() -> None:
    text = "a = 1\n[model]\nrecompute = 3\n"
    table = tomllib.loads(set_keys(text, {"recompute": "full"}))
    assert table == {"a": 1, "recompute": "full", "model": {"recompute": 3}}
