"""Training steps of several systems: real processes on a tiny GPT-2, and statistics by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ingot.bench import train
from ingot.bench.peaks import Peak, Peaks
from ingot.bench.train import (
    FP32,
    LORA,
    OURS,
    PEFT,
    SYSTEMS,
    TrainingRuns,
    TrainingSystem,
    TrainTask,
    WorkerReport,
    compare,
    rows,
    summarize,
)
from ingot.bench.train_worker import WARMUP_STEPS
from ingot.core.errors import ConfigError

EAGER = TrainingSystem(system="eager")
FULL = TrainingSystem(system="ingot", recompute="full")
TASK = TrainTask(batch_size=3, seq_len=17, rounds=2)
PEAKS = Peaks(
    method=1,
    measured=datetime.now(UTC),
    read_bandwidth=Peak.from_slices(4.0, [4.0]),
    matmul={
        "fp32": Peak.from_slices(6.0, [6.0]),
        "bf16": Peak.from_slices(12.0, [12.0]),
        "int8": None,
    },
)


def report(
    *seconds: float, peak_bytes: int = 4000, idle_bytes: int = 1000, loss: float = 5.0
) -> WorkerReport:
    """Steps of these lengths: a quarter forward, half backward, a quarter optimizer."""
    content = {
        "version": "1.0",
        "losses": [loss] * (WARMUP_STEPS + len(seconds)),
        "steps": [{"forward": s / 4, "backward": s / 2, "optimizer": s / 4} for s in seconds],
        "idle_bytes": idle_bytes,
        "activation_bytes": peak_bytes - 2000,
        "peak_bytes": peak_bytes,
    }
    return train.msgspec.convert(content, WorkerReport)


def test_systems_run_in_processes(gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[str] = []
    monkeypatch.setattr(train, "STEPS", 1)
    result = compare((OURS, EAGER), gpt2, replace(TASK, rounds=1), PEAKS, progress.append)
    ours, eager = result
    names = sorted(text.rpartition(": ")[2] for text in progress)
    assert names == ["eager bf16", "ingot bf16"]
    assert ours.error is None
    assert eager.error is None
    for row in (ours, eager):
        assert (row.tokens_per_s or 0) > 0
        assert (row.peak_memory_bytes or 0) > 2**26
        assert (row.roofline_fraction or 0) > 0
        # Random tokens of 211, so a loss of about ln 211.
        assert 5.2 < (row.first_loss or 0) < 5.5
    assert eager.first_loss == pytest.approx(ours.first_loss, rel=1e-3)
    assert eager.last_loss == pytest.approx(ours.last_loss, rel=1e-3)
    assert eager.last_loss != eager.first_loss


def test_failed_process_is_reported_with_its_status(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (row,) = compare((OURS,), gpt2, replace(TASK, rounds=1), PEAKS)
    assert "exited with 1: no output (see " in (row.error or "")


@pytest.mark.slow
def test_all_systems_succeed(gpt2: Path) -> None:
    result = compare(SYSTEMS, gpt2, replace(TASK, rounds=1), PEAKS)
    assert [row.error for row in result] == [None] * len(SYSTEMS)
    summary = summarize(result)
    assert summary.best_peer in ("eager", "compile", "trainer")
    recompute = ("recompute selective", "recompute full")
    assert set(summary.options) == {*recompute, "state bf16", "recompute full, state bf16"}


def test_measurements_and_summary() -> None:
    adapted = partial(report, loss=6.0)
    runs = {
        OURS: TrainingRuns(reports=[report(1, 1, 2), report(2, 2, 2)]),
        EAGER: TrainingRuns(
            reports=[report(2, 2, 9, peak_bytes=8000), report(6, 6, 6, peak_bytes=8000)]
        ),
        FP32: TrainingRuns(reports=[report(4), report(8)]),
        FULL: TrainingRuns(reports=[report(3, peak_bytes=2500), report(6, peak_bytes=2500)]),
        TrainingSystem(system="trainer"): TrainingRuns(error="reason"),
        LORA: TrainingRuns(reports=[adapted(0.5, idle_bytes=250), adapted(1, idle_bytes=250)]),
        PEFT: TrainingRuns(reports=[adapted(2), adapted(4)]),
    }
    ours, eager, fp32, _, failed, lora, peft = result = rows(runs, "gpt2", 1000, TASK, PEAKS)
    assert ours.tokens_per_s == pytest.approx(51 / 2)
    assert (ours.forward_s, ours.backward_s, ours.optimizer_s) == (0.5, 1.0, 0.5)
    assert (ours.peak_memory_bytes, ours.step_memory_bytes) == (4000, 3000)
    # 12 GFLOPS over 6 x 1000 FLOPs per token; half of it in float32.
    assert ours.roofline_tokens_per_s == 2e6
    assert fp32.roofline_tokens_per_s == 1e6
    assert ours.roofline_fraction == pytest.approx(25.5 / 2e6, rel=1e-3)
    # Twice as fast in the first round, three times in the second.
    assert (ours.speedup, eager.speedup) == (1.0, 2.5)
    assert (lora.speedup, peft.speedup) == (0.5, 4.0)  # PEFT is compared with LoRA
    assert (failed.error, failed.tokens_per_s) == ("reason", None)
    summary = summarize(result)
    assert (summary.best_peer, summary.speedup, summary.memory_ratio) == ("eager", 2.5, 0.5)
    assert (summary.backward_over_forward, summary.bf16_over_fp32) == (2.0, 4.0)
    assert (summary.lora_over_full, summary.lora_over_peft) == (2.0, {"bf16": 4.0})
    assert summary.lora_idle_memory_ratio == 0.25
    saved = {"peak_memory_saved": 0.375, "step_memory_saved": 0.5, "activation_memory_saved": 0.75}
    ratios = {
        "time_ratio": 3.0,
        "speedup": pytest.approx(2.5 / 3, rel=1e-3),
        "memory_ratio": 2500 / 8000,
    }
    assert summary.options == {"recompute full": {**saved, **ratios}}


@pytest.mark.parametrize("loss", [5.2, float("nan")])
def test_system_with_other_losses_is_an_error(loss: float) -> None:
    runs = {
        OURS: TrainingRuns(reports=[report(1)]),
        EAGER: TrainingRuns(reports=[report(1, loss=loss)]),
    }
    ours, eager = result = rows(runs, "gpt2", 1000, TASK, PEAKS)
    assert ours.error is None
    assert "loss of step 1 is" in (eager.error or "")
    assert eager.tokens_per_s is None
    assert summarize(result).speedup is None


def test_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    assert TrainingSystem(system="eager").unavailable_reason() is None
    assert "pip install transformers" in (
        TrainingSystem(system="trainer").unavailable_reason() or ""
    )


def test_invalid_report_is_an_error(
    gpt2: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("GOMP_SPINCOUNT", "10000")
    spins: dict[str, str | None] = {}

    def run(command: list[str], env: dict[str, str], **options: Any) -> Any:
        spins[json.loads(command[-1])["system"]] = env.get("GOMP_SPINCOUNT")
        wrong = report(1)
        content = {**train.msgspec.to_builtins(wrong), "peak_bytes": -1}
        return subprocess.CompletedProcess([sys.executable], 0, json.dumps(content).encode())

    monkeypatch.setattr(train.subprocess, "run", run)
    result = compare((OURS, EAGER), gpt2, replace(TASK, rounds=1), PEAKS)
    assert all("invalid report" in (row.error or "") for row in result)
    assert spins == {"ingot": "10000", "eager": None}, "other systems keep their thread settings"


def test_seq_len_beyond_max_seq_len_is_rejected(gpt2: Path) -> None:
    with pytest.raises(ConfigError, match="at most 64"):
        compare((OURS,), gpt2, replace(TASK, seq_len=65), PEAKS)
