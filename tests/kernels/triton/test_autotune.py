"""Autotuning without a GPU: kernels run in Triton's interpreter, and tests set the times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.kernels.triton import config_store
from ingot.kernels.triton.autotune import tuning_tasks
from ingot.kernels.triton.interpreter import Interpreter
from ingot.kernels.triton.target import TARGETS

BEGIN = """
import torch
from unittest import mock
from triton.runtime.errors import OutOfResources
from ingot import ops
from ingot.kernels.tuned import database_path
from ingot.kernels.triton import config_store
from ingot.kernels.triton.launch import Launch, record_launches
from ingot.kernels.triton.provider import triton_ops
from ingot.kernels.triton.autotune import tune, tuning_tasks

def seconds(run):
    "Return a time that falls with the number of warps."
    run()
    return 1.0 / run.args[0].num_warps

(task, *_) = tuning_tasks(("softmax",), torch.float16)
configs = [str(config) for config in task.launch.configs(config_store.TARGETS["sm_90"])]
"""


@pytest.fixture
def run(interpreter: Interpreter, tmp_path: Path) -> Callable[[str], Any]:
    """Run code in the interpreter with its own database; return its `result`."""
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    return lambda code: interpreter.call("run_code", code=BEGIN + code, env=env)


def test_fastest_configuration_is_stored_and_dispatched(
    run: Callable[[str], Any], tmp_path: Path
) -> None:
    result = run(
        """
tuned = tune(task, seconds, "cpu", rows=3)
with record_launches(execute=True) as launches, ops.prefer("triton"):
    ops.softmax(torch.zeros(5, 4096, dtype=torch.float16))
default = config_store.default_config(task.launch, "sm_90")
result = [configs, str(default), str(tuned.previous), str(tuned.config), tuned.seconds,
    tuned.previous_seconds, str(config_store.choose_config(launches[0])),
    str(database_path())]
""",
    )
    configs, default, previous, config, seconds, previous_seconds, chosen, database = result
    assert configs == [
        "num_warps=8 num_stages=1",
        "num_warps=16 num_stages=1",
        "num_warps=4 num_stages=1",
    ]
    assert previous == default != configs[1]
    assert config == configs[1]
    assert (seconds, 1 / previous_seconds) == pytest.approx((1 / 16, int(previous[10])))
    assert chosen == config
    assert Path(database).is_relative_to(tmp_path)
    assert Path(database).exists()


def test_inaccurate_and_failing_configurations_are_rejected(run: Callable[[str], Any]) -> None:
    result = run(
        """
run = Launch.run

def inaccurate(launch, config):
    run(launch, config)
    if config.num_warps == 16:
        launch.args[2].mul_(1.01)  # its output

def limited(run):
    if run.args[0].num_warps == 8:
        raise OutOfResources(300000, 232448, "shared memory")
    return seconds(run)

with mock.patch.object(Launch, "run", inaccurate):
    tuned = tune(task, limited, "cpu", rows=3)
result = [str(tuned.config), tuned.num_tried, tuned.rejected]
""",
    )
    config, num_tried, (failed, inaccurate) = result
    assert (config, num_tried) == ("num_warps=4 num_stages=1", 3)
    assert failed.startswith("num_warps=8 num_stages=1: out of resource: shared memory")
    assert inaccurate.startswith("num_warps=16 num_stages=1: ")
    assert inaccurate.endswith("times the tolerance")


def test_nothing_is_stored_if_no_configuration_is_accurate(run: Callable[[str], Any]) -> None:
    config, stored = run(
        """
run = Launch.run
wrong = lambda launch, config: (run(launch, config), launch.args[2].fill_(7.0))
with mock.patch.object(Launch, "run", wrong):
    tuned = tune(task, seconds, "cpu", rows=3)
result = [tuned.config, database_path().exists()]
""",
    )
    assert (config, stored) == (None, False)


@pytest.fixture
def h100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(config_store, "current_target", lambda: (TARGETS["sm_90"], "H100"))


@pytest.mark.usefixtures("h100")
def test_prefill_and_decode_are_tuned_together() -> None:
    (task,) = [t for t in tuning_tasks(("attention",)) if t.launch.kernel.name == "attention"]
    assert [(site.op, site.direction) for site in task.sites] == [
        *[("attention", "forward")] * 2,
        ("attention", "backward"),  # which recomputes the forward
    ]


@pytest.mark.usefixtures("h100")
def test_tasks_cover_every_choice_once() -> None:
    tasks = tuning_tasks()
    keys = [config_store.dispatch_key(task.launch) for task in tasks]
    assert len(set(keys)) == len(keys)
    assert all(len(task.launch.configs(TARGETS["sm_90"])) > 1 for task in tasks)
    assert {task.launch.kernel.name for task in tasks} >= {"linear", "attention", "norm", "softmax"}
    # Equal launches of several ops are timed once.
    sites = [site for task in tasks for site in task.sites]
    assert len(sites) < 100
    assert len(tuning_tasks(("silu",), torch.float32)) == 2
