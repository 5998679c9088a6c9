"""What is divergence and what is not."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from ingot.core.errors import ConfigError
from ingot.training.guard import SpikeDetector, SpikeGuardConfig, bad_batch_path, dump_bad_batch


def calm(watch: SpikeDetector, steps: int = 50, level: float = 4.0) -> None:
    noise = random.Random(0)
    for _ in range(steps):
        assert watch.check(level + noise.gauss(0, 0.05), 1.0) is None


@pytest.mark.parametrize(
    ("loss", "norm", "reason"),
    [
        (math.nan, 1.0, "a loss of nan"),
        (math.inf, 1.0, "a loss of inf"),
        (4.0, math.nan, "a gradient norm of nan"),
        (4.0, math.inf, "a gradient norm of inf"),
        (9.0, 1.0, "a loss of 9 where"),
    ],
)
def test_bad_losses_and_norms_have_a_reason(loss: float, norm: float, reason: str) -> None:
    watch = SpikeDetector(SpikeGuardConfig())
    calm(watch)
    assert (watch.check(loss, norm) or "").startswith(reason)


def test_losses_next_to_zero_are_no_spikes() -> None:
    watch = SpikeDetector(SpikeGuardConfig())
    for _ in range(50):
        assert watch.check(0.0, 1.0) is None  # solved
    assert watch.check(1e-6, 1.0) is None
    assert watch.check(0.1, 1.0) == "a loss of 0.1 where 0 is usual"


def test_not_finite_is_bad_from_the_first_step_on() -> None:
    assert SpikeDetector(SpikeGuardConfig()).check(math.nan, 1.0)


@pytest.mark.parametrize("loss", [0.0, -5.0, 4.3, 4.6])
def test_falling_and_wobbling_losses_are_good(loss: float) -> None:
    watch = SpikeDetector(SpikeGuardConfig())
    calm(watch)
    assert watch.check(loss, 1e9) is None


def test_a_fast_fall_and_a_plateau_are_good() -> None:
    watch = SpikeDetector(SpikeGuardConfig())
    for step in range(300):
        assert watch.check(10 * 0.98**step + 1, 1.0) is None
    for _ in range(200):
        assert watch.check(1.0, 1.0) is None
    assert watch.check(1.1, 1.0) is None


def test_spikes_do_not_become_usual() -> None:
    watch = SpikeDetector(SpikeGuardConfig(patience=1000))
    calm(watch)
    assert all(watch.check(9.0, 1.0) for _ in range(200))


def test_patience() -> None:
    watch = SpikeDetector(SpikeGuardConfig(patience=2, window=50))
    calm(watch)
    for exhausted in (False, False, True):
        assert watch.check(math.nan, 1.0)
        assert watch.exhausted is exhausted
    calm(watch, 60)
    assert not watch.exhausted
    assert watch.check(math.nan, 1.0)
    assert not watch.exhausted


def test_a_saved_state_resumes() -> None:
    first = SpikeDetector(SpikeGuardConfig(patience=1))
    calm(first)
    assert first.check(math.nan, 1.0)
    second = SpikeDetector(SpikeGuardConfig(patience=1))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.check(9.0, 1.0) == first.check(9.0, 1.0) is not None
    assert second.exhausted
    assert second.state_dict() == first.state_dict()


def test_the_offending_samples_are_saved(tmp_path: Path) -> None:
    path = bad_batch_path(tmp_path, 7)
    dump_bad_batch(path, step=7, reason="a loss of nan", sample_ids=[3, 1])
    assert json.loads(path.read_text()) == {
        "step": 7,
        "reason": "a loss of nan",
        "sample_ids": [3, 1],
    }
    assert path.parent.parent == tmp_path


def test_bounds() -> None:
    with pytest.raises(ConfigError):
        SpikeGuardConfig(z_threshold=0.0)
    with pytest.raises(ConfigError):
        SpikeGuardConfig(window=1)
