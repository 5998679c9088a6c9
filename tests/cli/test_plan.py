from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., subprocess.CompletedProcess[str]]
ASKED = ("plan", "llama3-8b", "--gpu", "h100", "--seq-len", "8192", "--global-batch-size", "128")
RECIPE = Path(__file__).parents[2] / "recipes/gpt2-124m.toml"


def test_lines_for_people(cli: Run) -> None:
    result = cli(*ASKED, "--gpus", "64", "--price", "2", COLUMNS="120")
    assert result.returncode == 0, result.stderr
    assert "tokens/s/GPU" in result.stdout
    assert "GPU-hours for 1e+12 tokens" in result.stdout
    assert "cost" in result.stdout
    assert "plans need too much memory" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 120


def test_json_has_seconds_and_bytes_by_part(cli: Run) -> None:
    found = json.loads(cli(*ASKED, "--gpus", "64", "--json").stdout)
    first = found["plans"][0]
    assert first["dp"] * first["fsdp"] * first["tp"] * first["pp"] * first["cp"] == 64
    assert sum(first["seconds_by_part"].values()) == first["step_s"]
    assert first["interval_s"][0] < first["step_s"] < first["interval_s"][1]
    assert sum(first["bytes_by_part"].values()) < 80 * 2**30


def test_a_plan_is_written_into_a_recipe(cli: Run, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.read_text())
    options = ("--gpu", "a100", "--gpus", "4", "--seq-len", "1024", "--global-batch-size", "4")
    result = cli("plan", str(recipe), *options, "--apply", str(recipe))
    assert result.returncode == 0, result.stderr
    assert "parallel" in result.stderr
    parallel = tomllib.loads(recipe.read_text())["parallel"]
    assert set(parallel) == {"pp", "dp", "ep", "cp", "tp", "schedule", "batch_shards"}


def test_errors_have_hints(cli: Run) -> None:
    for change, message in (
        (("--gpus", "8", "--gpu", "h1000"), "unknown GPU"),
        (("--gpus", "0"), "above 0"),
        (("--gpus", "8", "--tokens", "-1"), "--tokens"),
        (("--gpus", "8", "--calibrate", "nowhere"), "no run of"),
    ):
        result = cli(*ASKED, *change)
        assert result.returncode == 2, change
        assert message in result.stderr
        assert "hint:" in result.stderr


def test_the_planner_imports_no_torch() -> None:
    code = (
        "import sys, ingot.cli.plan, ingot.workflows.plan, ingot.planning.search\n"
        "ingot.workflows.plan.plan('llama3-8b', gpu='h100', gpus=8, seq_len=8192, "
        "global_batch_size=8)\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
