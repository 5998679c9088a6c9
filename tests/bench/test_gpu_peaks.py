"""Peaks of a GPU from time slices: on the CPU, with given times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ingot.bench import gpu_peaks
from ingot.bench.machine import peaks
from ingot.bench.peaks import Dtype, Peaks

SIZES: dict[Dtype, int] = {"fp32": 16, "bf16": 32, "int8": 32}


def test_peak_is_the_best_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_peaks, "ROUNDS", 3)
    taken: list[float] = []
    progress: list[int] = []

    def timer(run: Callable[[], object], seconds: float) -> list[float]:
        run()
        taken.append(seconds)
        round_ = (len(taken) - 1) // 4
        return [(4e-6, 1e-6, 2e-6)[round_]] * 2

    found = gpu_peaks.measure(
        "cpu", lambda: progress.append(1), timer=timer, read_bytes=2**21, sizes=SIZES
    )
    assert len(progress) == 3
    assert len(taken) == 12
    assert found.read_bandwidth.value == pytest.approx(2**21 / 1e-6 / 1e9, rel=1e-3)
    assert found.read_bandwidth.typical == pytest.approx(2**21 / 2e-6 / 1e9, rel=1e-3)
    bf16 = found.matmul["bf16"]
    assert bf16 is not None
    assert bf16.value == pytest.approx(2 * 32**3 / 1e-6 / 1e9, rel=1e-3)


def test_dtype_without_matmul_is_missing_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("no int8 here\nat line 7")

    monkeypatch.setattr(gpu_peaks, "ROUNDS", 1)
    monkeypatch.setattr(torch, "_int_mm", refuse)
    found = gpu_peaks.measure(
        "cpu", timer=lambda run, seconds: [1e-6], read_bytes=2**21, sizes=SIZES
    )
    assert found.matmul["int8"] is None
    assert found.missing == {"int8": "no int8 here"}
    assert Peaks.from_json(found.to_json()) == found


def test_gpu_peaks_are_cached_separately_from_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(gpu_peaks, "ROUNDS", 1)
    made = gpu_peaks.measure(
        "cpu", timer=lambda run, seconds: [1e-6], read_bytes=2**21, sizes=SIZES
    )
    calls: list[str] = []

    def measure(device: str, progress: object) -> Peaks:
        calls.append(device)
        return made

    monkeypatch.setattr(gpu_peaks, "measure", measure)
    assert peaks(device="xpu") == made
    assert peaks(device="xpu") == made
    assert calls == ["xpu"]
    (kept,) = (tmp_path / "ingot" / "peaks").glob("*.json")
    assert kept.name.endswith("-gpu.json")
