"""Ranks that are started, killed, started again and stopped, as a user would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from ingot.core import config
from ingot.parallel.config import ParallelConfig
from ingot.training.trainer import Trainer
from tests.training import runs

STEPS = 40


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    options = {"steps": STEPS, "grad_accum_steps": 2, "checkpoint_every": 3, "eval_every": 0}
    config.save(runs.text(tmp_path, **options), path)
    return path


def start(recipe: Path, run: Path, *options: str, ranks: int = 2) -> subprocess.Popen[str]:
    """`ingot train`, whose messages go to a file next to the run."""
    command = [sys.executable, "-m", "ingot", "train", str(recipe), "--run", str(run)]
    with log_of(run).open("a") as log:
        return subprocess.Popen([*command, "--ranks", str(ranks), *options], stderr=log, text=True)


def log_of(run: Path) -> Path:
    return run.with_name("log.txt")


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
        assert process.poll() is None, log_of(run).read_text()
        time.sleep(0.02)


def wait_for_progress(run: Path, process: subprocess.Popen[str]) -> None:
    """Wait for a checkpoint that is not there yet."""
    known = set((run / "checkpoints").glob("step-*"))
    end = time.monotonic() + 180
    while not set((run / "checkpoints").glob("step-*")) - known:
        assert time.monotonic() < end
        assert process.poll() is None, log_of(run).read_text()
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
    assert process.wait(180) == 0
    assert (run / "model" / "config.json").is_file()
    assert not ranks_of(run)
    assert_whole_run(recipe, run, tmp_path / "whole")


def test_a_run_that_lost_a_rank_says_how_to_continue(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(recipe, run)
    wait_for(run, 1, process)
    os.kill(ranks_of(run)[0], signal.SIGKILL)
    assert process.wait(180) == 2
    error = log_of(run).read_text()
    assert "rank 0 of 2 exited with status -9" in error
    assert "--resume" in error
    assert not ranks_of(run)


def test_an_interrupted_run_writes_a_checkpoint_and_continues(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(recipe, run)
    wait_for(run, 1, process)
    process.send_signal(signal.SIGINT)
    assert process.wait(180) == 130
    assert start(recipe, run, "--resume").wait(180) == 0
    assert_whole_run(recipe, run, tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named_and_the_run_continues(
    rank: int, recipe: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(recipe, run, "--max-restarts", "1", "parallel.timeout_s=5")
    wait_for(run, 2, process)
    os.kill(ranks_of(run)[rank], signal.SIGSTOP)
    assert process.wait(180) == 0
    logs = [log_of(run), *(run / "ranks").rglob("stderr.log")]  # the other rank's has it
    assert any(f"rank {rank}: does not answer in all_" in log.read_text() for log in logs)
    (found,) = (run / "ranks").glob("*-collectives.json")
    assert found.name == f"{1 - rank}-collectives.json"
    assert json.loads(found.read_text())["entries"]
    assert_whole_run(recipe, run, tmp_path / "whole")


@pytest.mark.slow
def test_twenty_killed_and_five_hanging_ranks_change_no_bit(tmp_path: Path) -> None:
    """On four ranks; after some of the failures the run continues on two, and then on four."""
    path, run, random = tmp_path / "recipe.toml", tmp_path / "run", Random(0)
    options = {"steps": 400, "grad_accum_steps": 4, "checkpoint_every": 2, "eval_every": 0}
    parallel = ParallelConfig(timeout_s=5.0)
    config.save(runs.text(tmp_path, parallel=parallel, **options), path)
    signals = [signal.SIGKILL] * 20 + [signal.SIGSTOP] * 5
    random.shuffle(signals)
    process, seconds = None, []
    for index in range(0, len(signals), 5):
        ranks = (4, 2)[index // 5 % 2]
        more = [*(["--resume"] if index else []), "--max-restarts", "5"]
        process = start(path, run, *more, ranks=ranks)
        for number in signals[index : index + 5]:
            wait_for_progress(run, process)
            time.sleep(random.random())
            begin = time.monotonic()
            os.kill(random.choice(ranks_of(run)), number)
            wait_for_progress(run, process)
            seconds.append((number.name, time.monotonic() - begin))
        if index + 5 < len(signals):
            process.send_signal(signal.SIGINT)
            assert process.wait(180) == 130
    assert process is not None
    assert process.wait(180) == 0
    assert not ranks_of(run)
    assert not list((run / "checkpoints").glob(".*"))
    print(seconds)  # noqa: T201
    assert_whole_run(path, run, tmp_path / "whole")
