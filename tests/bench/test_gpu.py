"""How a GPU's peaks are made out of turns: on the CPU, with times that a test says. On a device
that is not the CPU it runs in `tests/test_fake_device.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ingot.bench import gpu
from ingot.bench.peaks import Dtype, Peaks, peaks

SIZES: dict[Dtype, int] = {"fp32": 16, "bf16": 32, "int8": 32}


def test_the_peak_is_the_best_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROUNDS", 3)
    taken: list[float] = []
    heard: list[int] = []

    def take(run: Callable[[], object], seconds: float) -> list[float]:
        run()
        taken.append(seconds)
        round_ = (len(taken) - 1) // 4
        return [(4e-6, 1e-6, 2e-6)[round_]] * 2

    found = gpu.measure("cpu", lambda: heard.append(1), take=take, read=2**21, sizes=SIZES)
    assert len(heard) == 3
    assert len(taken) == 12
    assert found.read_bandwidth.value == pytest.approx(2**21 / 1e-6 / 1e9, rel=1e-3)
    assert found.read_bandwidth.typical == pytest.approx(2**21 / 2e-6 / 1e9, rel=1e-3)
    bf16 = found.matmul["bf16"]
    assert bf16 is not None
    assert bf16.value == pytest.approx(2 * 32**3 / 1e-6 / 1e9, rel=1e-3)


def test_what_the_device_cannot_multiply_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no int8 here\nat line 7")

    monkeypatch.setattr(gpu, "ROUNDS", 1)
    monkeypatch.setattr(torch, "_int_mm", refuse)
    found = gpu.measure("cpu", take=lambda run, seconds: [1e-6], read=2**21, sizes=SIZES)
    assert found.matmul["int8"] is None
    assert found.missing == {"int8": "no int8 here"}
    assert Peaks.from_json(found.to_json()) == found


def test_a_gpus_peaks_are_kept_beside_the_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu, "ROUNDS", 1)
    made = gpu.measure("cpu", take=lambda run, seconds: [1e-6], read=2**21, sizes=SIZES)
    calls: list[str] = []

    def measure(place: str, progress: object) -> Peaks:
        calls.append(place)
        return made

    monkeypatch.setattr(gpu, "measure", measure)
    assert peaks(place="far") == made
    assert peaks(place="far") == made
    assert calls == ["far"]
    (kept,) = (tmp_path / "ingot" / "peaks").glob("*.json")
    assert kept.name.endswith("-gpu.json")
