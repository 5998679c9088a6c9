"""Autotuning without a GPU: kernels run in Triton's interpreter, and tests set the times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.kernels.triton import config_store
from ingot.kernels.triton.autotune import tuning_tasks
from ingot.kernels.triton.target import TARGETS

BEGIN = """
import json, torch
from triton.runtime.errors import OutOfResources
from ingot import ops
from ingot.kernels.triton import config_store
from ingot.kernels.triton.launch import Launch, record_launches
from ingot.kernels.triton.provider import triton_ops
from ingot.kernels.triton.autotune import tune, tuning_tasks

def seconds(run):
    "Return a time that falls with the number of warps."
    run()
    return 1.0 / run.args[0].num_warps

(task, *_) = tuning_tasks(("softmax",), torch.float16)
configs = [str(config) for config in task.launch.configs(TARGETS["sm_90"])]
"""


def run_interpreted(tmp_path: Path, code: str) -> Any:
    """Run a script in the interpreter with its own database; return the JSON that it prints."""
    text = BEGIN.replace("TARGETS", "config_store.TARGETS") + code
    env = {**os.environ, "TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_fastest_configuration_is_stored_and_dispatched(tmp_path: Path) -> None:
    found = run_interpreted(
        tmp_path,
        """
result = tune(task, seconds, "cpu", rows=3)
with record_launches(execute=True) as launches, ops.prefer("triton"):
    ops.softmax(torch.zeros(5, 4096, dtype=torch.float16))
default = config_store.default_config(task.launch, "sm_90")
print(json.dumps([configs, str(default), str(result.previous), str(result.config), result.seconds,
    result.previous_seconds, str(config_store.choose_config(launches[0])),
    str(config_store.database_path())]))
""",
    )
    configs, default, before, config, seconds, before_seconds, taken, store = found
    assert configs == [
        "num_warps=8 num_stages=1",
        "num_warps=16 num_stages=1",
        "num_warps=4 num_stages=1",
    ]
    assert before == default != configs[1]
    assert config == configs[1]
    assert (seconds, 1 / before_seconds) == pytest.approx((1 / 16, int(before[10])))
    assert taken == config
    assert Path(store).is_relative_to(tmp_path)
    assert Path(store).exists()


def test_inaccurate_and_failing_configurations_are_rejected(tmp_path: Path) -> None:
    found = run_interpreted(
        tmp_path,
        """
run = Launch.run

def fault(launch, config):
    run(launch, config)
    if config.num_warps == 16:
        launch.args[2].mul_(1.01)  # its output

def most(run):
    if run.args[0].num_warps == 8:
        raise OutOfResources(300000, 232448, "shared memory")
    return seconds(run)

Launch.run = fault
result = tune(task, most, "cpu", rows=3)
print(json.dumps([str(result.config), result.num_tried, result.rejected]))
""",
    )
    config, tried, (failed, wrong) = found
    assert (config, tried) == ("num_warps=4 num_stages=1", 3)
    assert failed.startswith("num_warps=8 num_stages=1: out of resource: shared memory")
    assert wrong.startswith("num_warps=16 num_stages=1: ")
    assert wrong.endswith("times the tolerance")


def test_nothing_is_stored_if_no_configuration_is_accurate(tmp_path: Path) -> None:
    config, kept = run_interpreted(
        tmp_path,
        """
run = Launch.run
Launch.run = lambda launch, config: (run(launch, config), launch.args[2].fill_(7.0))
result = tune(task, seconds, "cpu", rows=3)
print(json.dumps([result.config, config_store.database_path().exists()]))
""",
    )
    assert (config, kept) == (None, False)


@pytest.fixture
def h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(config_store, "current_target", lambda: (TARGETS["sm_90"], "H100"))


@pytest.mark.usefixtures("h100")
def test_prefill_and_decode_are_tuned_together() -> None:
    (task,) = [t for t in tuning_tasks(("attention",)) if t.launch.kernel.name == "attention"]
    assert [(place.op, place.direction) for place in task.sites] == [
        *[("attention", "forward")] * 2,
        ("attention", "backward"),  # which recomputes the forward
    ]


@pytest.mark.usefixtures("h100")
def test_tasks_cover_every_choice_once() -> None:
    found = tuning_tasks()
    keys = [config_store.dispatch_key(task.launch) for task in found]
    assert len(set(keys)) == len(keys)
    assert all(len(task.launch.configs(TARGETS["sm_90"])) > 1 for task in found)
    assert {task.launch.kernel.name for task in found} >= {"linear", "attention", "norm", "softmax"}
    # Equal launches of several ops are timed once.
    sites = [place for task in found for place in task.sites]
    assert len(sites) < 100
    assert len(tuning_tasks(("silu",), torch.float32)) == 2
