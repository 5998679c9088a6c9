"""A training step beside others: real processes on a tiny GPT-2, and how their turns add up."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ingot.bench import train
from ingot.bench.peaks import Peak, Peaks
from ingot.bench.train import (
    CONTENDERS,
    FP32,
    OURS,
    Contender,
    Task,
    Turn,
    Turns,
    compare,
    rows,
    summary,
)
from ingot.bench.trainee import WARM
from ingot.core.errors import ConfigError

EAGER = Contender(system="eager")
FULL = Contender(system="ingot", recompute="full")
TASK = Task(batch=3, length=17, rounds=2)
PEAKS = Peaks(
    method=1,
    measured=datetime.now(UTC),
    read_bandwidth=Peak.of(4.0, [4.0]),
    matmul={"fp32": Peak.of(6.0, [6.0]), "bf16": Peak.of(12.0, [12.0]), "int8": None},
)


def turn(*seconds: float, peak: int = 4000, resting: int = 1000, loss: float = 5.0) -> Turn:
    """Steps of these lengths: a quarter forward, half backward, a quarter update."""
    said = {
        "version": "1.0",
        "losses": [loss] * (WARM + len(seconds)),
        "steps": [{"forward": s / 4, "backward": s / 2, "update": s / 4} for s in seconds],
        "resting": resting,
        "activations": peak - 2000,
        "peak": peak,
    }
    return train.msgspec.convert(said, Turn)


def test_systems_take_turns_in_processes(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(train, "STEPS", 1)
    gone = Contender(system="nobody")
    found = compare((OURS, EAGER, gone), gpt2, replace(TASK, rounds=1), PEAKS, heard.append)
    ours, eager, missing = found
    names = sorted(text.rpartition(": ")[2] for text in heard)
    assert names == ["eager bf16", "ingot bf16", "nobody bf16"]
    assert ours.missing is None
    assert eager.missing is None
    assert "KeyError: 'nobody'" in (missing.missing or "")
    for row in (ours, eager):
        assert (row.tokens_per_s or 0) > 0
        assert (row.peak_memory_bytes or 0) > 2**26
        assert (row.share_of_limit or 0) > 0
        # Random tokens of 211, so a loss of about ln 211.
        assert 5.2 < (row.first_loss or 0) < 5.5
    assert eager.first_loss == pytest.approx(ours.first_loss, rel=1e-3)
    assert eager.last_loss == pytest.approx(ours.last_loss, rel=1e-3)
    assert eager.last_loss != eager.first_loss


@pytest.mark.slow
def test_all_systems(gpt2: Path) -> None:
    found = compare(CONTENDERS, gpt2, replace(TASK, rounds=1), PEAKS)
    assert [row.missing for row in found] == [None] * len(CONTENDERS)
    said = summary(found)
    assert said.best_peer in ("eager", "compile", "trainer")
    again = ("recompute selective", "recompute full")
    assert set(said.options) == {*again, "moments bf16", "recompute full, moments bf16"}


def test_figures() -> None:
    turns = {
        OURS: Turns(turns=[turn(1, 1, 2), turn(2, 2, 2)]),
        EAGER: Turns(turns=[turn(2, 2, 9, peak=8000), turn(6, 6, 6, peak=8000)]),
        FP32: Turns(turns=[turn(4), turn(8)]),
        FULL: Turns(turns=[turn(3, peak=2500), turn(6, peak=2500)]),
        Contender(system="trainer"): Turns(missing="why"),
    }
    ours, eager, fp32, _, gone = found = rows(turns, "gpt2", 1000, TASK, PEAKS)
    assert ours.tokens_per_s == pytest.approx(51 / 2)
    assert (ours.forward_s, ours.backward_s, ours.update_s) == (0.5, 1.0, 0.5)
    assert (ours.peak_memory_bytes, ours.step_memory_bytes) == (4000, 3000)
    # 12 GFLOPS over 6 x 1000 FLOPs a token; half of it in float32.
    assert ours.limit_tokens_per_s == 2e6
    assert fp32.limit_tokens_per_s == 1e6
    assert ours.share_of_limit == pytest.approx(25.5 / 2e6, rel=1e-3)
    # Twice as fast in the first round, three times in the second.
    assert (ours.ingot_faster, eager.ingot_faster) == (1.0, 2.5)
    assert (gone.missing, gone.tokens_per_s) == ("why", None)
    said = summary(found)
    assert (said.best_peer, said.faster, said.memory) == ("eager", 2.5, 0.5)
    assert (said.backward_over_forward, said.bf16_over_fp32) == (2.0, 4.0)
    saved = {"peak_memory_saved": 0.375, "step_memory_saved": 0.5, "activation_memory_saved": 0.75}
    beside = {"time": 3.0, "faster": pytest.approx(2.5 / 3, rel=1e-3), "memory": 2500 / 8000}
    assert said.options == {"recompute full": {**saved, **beside}}


@pytest.mark.parametrize("loss", [5.2, float("nan")])
def test_who_computes_something_else_does_not_count(loss: float) -> None:
    turns = {OURS: Turns(turns=[turn(1)]), EAGER: Turns(turns=[turn(1, loss=loss)])}
    ours, eager = found = rows(turns, "gpt2", 1000, TASK, PEAKS)
    assert ours.missing is None
    assert "its loss at step 1" in (eager.missing or "")
    assert eager.tokens_per_s is None
    assert summary(found).faster is None


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    assert Contender(system="eager").missing() is None
    assert "pip install transformers" in (Contender(system="trainer").missing() or "")


def test_nonsense_is_not_believed(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    spins: dict[str, str | None] = {}

    def said(command: list[str], env: dict[str, str], **options: Any) -> Any:
        spins[json.loads(command[-1])["system"]] = env.get("GOMP_SPINCOUNT")
        wrong = turn(1)
        content = {**train.msgspec.to_builtins(wrong), "peak": -1}
        return subprocess.CompletedProcess([sys.executable], 0, json.dumps(content).encode())

    monkeypatch.setattr(train.subprocess, "run", said)
    found = compare((OURS, EAGER), gpt2, replace(TASK, rounds=1), PEAKS)
    assert all("cannot be read" in (row.missing or "") for row in found)
    assert spins == {"ingot": "10000", "eager": None}, (
        "what is set for our threads is not for others"
    )


def test_a_length_beyond_the_context_is_refused(gpt2: Path) -> None:
    with pytest.raises(ConfigError, match="beyond the model's 64"):
        compare((OURS,), gpt2, replace(TASK, length=65), PEAKS)
