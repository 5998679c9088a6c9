"""The worker process: the same steps for all systems, and their measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.bench import train_worker
from ingot.bench.train_worker import WARMUP_STEPS, StepClock, batch


def test_warmup_steps_are_not_reported() -> None:
    clock, held = StepClock(), []
    for number in range(WARMUP_STEPS + 2):
        clock.begin()
        held.append(torch.ones(2**22))  # 16 MiB
        clock.lap("forward")
        clock.lap("backward")
        clock.end(float(number))
    report = clock.report("1.0")
    assert report["losses"] == [0.0, 1.0, 2.0, 3.0]
    assert [set(step) for step in report["steps"]] == [{"forward", "backward", "optimizer"}] * 2
    assert all(0 < seconds < 60 for step in report["steps"] for seconds in step.values())
    assert report["peak_bytes"] - report["idle_bytes"] > 3 * 2**24 * 0.9
    assert 2**24 <= report["activation_bytes"] < 2**25


def test_peak_memory_excludes_warmup() -> None:
    clock = StepClock()
    for number in range(WARMUP_STEPS + 1):
        clock.begin()
        if number == 0:
            torch.ones(2**26)  # 256 MiB
        clock.end(0.0)
    report = clock.report("1.0")
    assert report["peak_bytes"] - report["idle_bytes"] < 2**27


@pytest.mark.parametrize("system", ["ingot", "eager", "lora", "peft"])
def test_step_reduces_the_loss(
    system: str, gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same batch repeatedly, at a higher learning rate."""
    monkeypatch.setattr(train_worker, "_LR", 0.01)
    monkeypatch.setattr(train_worker, "batch", lambda number, *shape: batch(0, *shape))
    task: dict[str, Any] = {
        "model": str(gpt2),
        "precision": "bf16",
        "recompute": "none",
        "state_dtype": "fp32",
        "batch_size": 2,
        "seq_len": 9,
        "steps": 8,
        "folder": str(tmp_path),
    }
    clock = StepClock()
    train_worker.SYSTEMS[system](task, clock)
    losses = clock.report("1.0")["losses"]
    assert losses[-1] < losses[0] - 0.5


def test_batches_differ_by_step_and_not_by_run() -> None:
    one, two = batch(0, 2, 5, 99)[0], batch(1, 2, 5, 99)[0]
    assert torch.equal(one, batch(0, 2, 5, 99)[0])
    assert not torch.equal(one, two)
    assert int(one.max()) < 99
