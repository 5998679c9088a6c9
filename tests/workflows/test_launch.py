"""Ranks that are started, killed, started again and stopped, as a user would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ingot.core import config
from ingot.training.trainer import Trainer
from tests.training import runs

STEPS = 40


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    options = {"steps": STEPS, "grad_accum_steps": 2, "checkpoint_every": 3, "eval_every": 0}
    config.save(runs.text(tmp_path, **options), path)
    return path


def start(recipe: Path, run: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "ingot", "train", str(recipe), "--run", str(run)]
    return subprocess.Popen([*command, "--ranks", "2", *options], stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit status and what it printed to stderr."""
    error = process.communicate(timeout=120)[1]
    return process.returncode, error


def ranks_of(run: Path) -> list[int]:
    """The processes of the ranks, without the one that started them."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if str(run) in words and "--ranks" not in words:
            found.append(int(process.name))
    return sorted(found)


def wait_for(run: Path, checkpoints: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while len(list((run / "checkpoints").glob("step-*"))) < checkpoints:
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)


def assert_whole_run(recipe: Path, run: Path, other: Path) -> None:
    from ingot.training.recipe import Recipe

    whole = Trainer(config.load(Recipe, recipe), other)
    assert whole.run() is not None
    assert runs.curve(run) == runs.curve(other)


def test_a_killed_rank_is_started_again_and_the_run_has_the_same_bits(
    recipe: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(recipe, run, "--max-restarts", "1")
    wait_for(run, 2, process)
    os.kill(ranks_of(run)[-1], signal.SIGKILL)
    assert finish(process)[0] == 0
    assert (run / "model" / "config.json").is_file()
    assert not ranks_of(run)
    assert_whole_run(recipe, run, tmp_path / "whole")


def test_a_run_that_lost_a_rank_says_how_to_continue(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(recipe, run)
    wait_for(run, 1, process)
    os.kill(ranks_of(run)[0], signal.SIGKILL)
    status, error = finish(process)
    assert status == 2
    assert "rank 0 of 2 exited with status -9" in error
    assert "--resume" in error
    assert not ranks_of(run)


def test_an_interrupted_run_writes_a_checkpoint_and_continues(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(recipe, run)
    wait_for(run, 1, process)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    assert finish(start(recipe, run, "--resume"))[0] == 0
    assert_whole_run(recipe, run, tmp_path / "whole")
