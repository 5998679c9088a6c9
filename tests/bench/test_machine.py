"""The cache of the peaks, with quick measurements."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path

import msgspec
import pytest

from ingot.bench import cpu_peaks
from ingot.bench.machine import cached_peaks, peaks
from ingot.bench.peaks import Peaks
from ingot.core import device, paths
from tests.bench.row import PEAKS


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_peaks, "_bytes_per_core", lambda _: 2**23)
    monkeypatch.setattr(cpu_peaks, "measure", partial(cpu_peaks.measure, budget=0.1))


@pytest.fixture
def path() -> Path:
    return paths.cache("peaks", f"{device.detect().fingerprint}.json")


def refuse(*_: object) -> None:
    raise AssertionError("measured although the peaks are cached")


@pytest.mark.parametrize("broken", ["lock", "write_atomic"])
def test_peaks_are_returned_even_if_they_cannot_be_cached(
    broken: str, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Root may write anywhere, so a directory takes the place of the file or its lock."""
    (path if broken == "write_atomic" else path.with_name(path.name + ".lock")).mkdir(parents=True)
    monkeypatch.setattr(cpu_peaks, "measure", lambda _: PEAKS)
    monkeypatch.setattr(logging.getLogger("ingot"), "propagate", True)
    assert peaks() == PEAKS
    assert "the peaks are not cached" in caplog.text


def test_cache_is_hit_and_refreshed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_peaks, "measure", partial(cpu_peaks.measure, budget=0.5))
    assert cached_peaks() is None
    first = peaks()
    assert Peaks.from_json(path.read_bytes()) == first
    again = peaks(refresh=True)
    assert again.measured > first.measured
    monkeypatch.setattr(cpu_peaks, "measure", refuse)
    assert peaks() == cached_peaks() == again


@pytest.mark.parametrize(
    "change",
    [
        {"method": 0},
        {"measured": "yesterday"},
        {"read_bandwidth": None},
        {"read_bandwidth": {"value": 1.0}},
        {"read_bandwidth": {"value": -4.0, "low": 1.0, "typical": 2.0, "high": 3.0}},
        {"read_bandwidth": {"value": "4", "low": 1.0, "typical": 2.0, "high": 3.0}},
        {"matmul": {}},
        {"matmul": {"fp32": None, "bf16": None, "fp8": None}},
        {"missing": [1]},
    ],
)
def test_invalid_cache_is_measured_again(
    change: dict[str, object], path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_peaks, "measure", lambda _: PEAKS)
    text = json.dumps(json.loads(PEAKS.to_json()) | change).encode()
    with pytest.raises(msgspec.DecodeError):
        Peaks.from_json(text)
    paths.write_atomic(path, text)
    assert peaks() == PEAKS


@pytest.mark.parametrize("text", [b"", b"{", b"null", b"[1]", b"\xff\xfe", b'{"tokens": 3}'])
def test_corrupt_cache_is_measured_again(
    text: bytes, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_peaks, "measure", lambda _: PEAKS)
    paths.write_atomic(path, text)
    assert peaks() == PEAKS
    assert Peaks.from_json(path.read_bytes()) == PEAKS
