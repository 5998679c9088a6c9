"""What one process does: the same steps for all, and what it says of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.bench import trainee
from ingot.bench.trainee import WARM, Clock, batch


def test_steps_that_warm_up_are_not_told() -> None:
    clock, held = Clock(), []
    for number in range(WARM + 2):
        clock.begin()
        held.append(torch.ones(2**22))  # 16 MiB
        clock.lap("forward")
        clock.lap("backward")
        clock.end(float(number))
    said = clock.report("1.0")
    assert said["losses"] == [0.0, 1.0, 2.0, 3.0]
    assert [set(step) for step in said["steps"]] == [{"forward", "backward", "update"}] * 2
    assert all(0 < seconds < 60 for step in said["steps"] for seconds in step.values())
    assert said["peak"] - said["resting"] > 3 * 2**24 * 0.9
    assert 2**24 <= said["activations"] < 2**25


def test_the_peak_is_of_the_steps_that_count() -> None:
    clock = Clock()
    for number in range(WARM + 1):
        clock.begin()
        if number == 0:
            torch.ones(2**26)  # 256 MiB
        clock.end(0.0)
    said = clock.report("1.0")
    assert said["peak"] - said["resting"] < 2**27


@pytest.mark.parametrize("system", ["ingot", "eager"])
def test_a_step_learns(system: str, gpt2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same batch again and again, at a higher rate."""
    monkeypatch.setattr(trainee, "_LR", 0.01)
    monkeypatch.setattr(trainee, "batch", lambda number, *shape: batch(0, *shape))
    task: dict[str, Any] = {
        "model": str(gpt2),
        "precision": "bf16",
        "recompute": "none",
        "moments": "fp32",
        "batch": 2,
        "length": 9,
        "steps": 8,
    }
    clock = Clock()
    trainee.SYSTEMS[system](task, clock)
    losses = clock.report("1.0")["losses"]
    assert losses[-1] < losses[0] - 1


def test_batches_differ_by_number_and_not_by_run() -> None:
    one, two = batch(0, 2, 5, 99)[0], batch(1, 2, 5, 99)[0]
    assert torch.equal(one, batch(0, 2, 5, 99)[0])
    assert not torch.equal(one, two)
    assert int(one.max()) < 99
