"""Real measurements with tiny budgets and buffers: invariants of the numbers, not their values."""

from __future__ import annotations

import json
import logging
import os
import timeit
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Thread

import msgspec
import pytest
import torch

from ingot.bench import cpu_peaks as module
from ingot.bench.cpu_peaks import measure
from ingot.bench.machine import cached_peaks, peaks
from ingot.bench.peaks import DTYPES, ROUNDS, Peak, Peaks
from ingot.bench.timing import Run
from ingot.core import device, paths

quick = partial(measure, budget=0.1)

PEAK = Peak(value=4.0, low=1.0, typical=2.0, high=3.0)
PEAKS = Peaks(
    method=1,
    measured=datetime(2026, 11, 15, tzinfo=UTC),
    read_bandwidth=PEAK,
    matmul={"fp32": PEAK, "bf16": PEAK, "int8": None},
    missing={"int8": "no kernel"},
)


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_bytes_per_core", lambda _: 2**23)
    monkeypatch.setattr(module, "measure", quick)


@pytest.fixture
def path() -> Path:
    return paths.cache("peaks", f"{device.detect().fingerprint}.json")


def refuse(*_: object) -> None:
    raise AssertionError("measured although the peaks are cached")


def test_measurement_is_complete() -> None:
    rounds: list[None] = []
    before = datetime.now(UTC)
    found = measure(lambda: rounds.append(None), budget=0.5)
    assert found.missing == {}
    assert len(rounds) == ROUNDS
    assert before <= found.measured <= datetime.now(UTC)
    assert tuple(found.matmul) == DTYPES
    for peak in (found.read_bandwidth, *found.matmul.values()):
        assert peak is not None
        assert peak.value > 0
        assert 0 < peak.low <= peak.typical <= peak.high


def test_zero_budget_still_measures() -> None:
    assert measure(budget=0).read_bandwidth.value > 0


def test_thread_count_is_restored() -> None:
    def report() -> None:
        counts.append(torch.get_num_threads())

    counts: list[int] = []
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        quick()
        report()
        thread = Thread(target=report)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert counts == [3, 3]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux has affinity")
def test_affinity_is_restored() -> None:
    before = os.sched_getaffinity(0)
    quick()
    assert os.sched_getaffinity(0) == before
    assert None not in module._cpus(1)
    assert len(module._cpus(1000)) == 1000


def test_threads_are_on_different_cores() -> None:
    core_of = {0: ("0", "0"), 1: ("0", "1"), 2: ("0", "0"), 3: ("0", "1"), 4: ("1", "0")}
    assert module._one_per_core(range(5), core_of) == [0, 1, 4]
    assert module._one_per_core([3, 2, 1], core_of) == [1, 2]
    assert module._one_per_core([7, 5], {}) == [5, 7]


def test_reader_reads_about_the_requested_bytes_and_restores_threads() -> None:
    before = torch.get_num_threads()
    with module.reader_on_all_cores(50 * 2**20) as (read, size):
        assert 0.8 < size / (50 * 2**20) < 1.3
        whole = min(timeit.repeat(read, number=1, repeat=5))
    with module.reader_on_all_cores(200 * 2**20) as (read, _):
        assert min(timeit.repeat(read, number=1, repeat=5)) > 1.5 * whole
    assert torch.get_num_threads() == before


def test_global_random_state_is_unchanged() -> None:
    before = torch.get_rng_state()
    quick()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("error", [RuntimeError("no kernel\nat line 7"), AttributeError()])
def test_failing_dtype_is_none_with_a_reason(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: int) -> Run:
        raise error

    monkeypatch.setitem(module._MATMULS, "bf16", (fail, 1, 1, 1))
    found = quick()
    assert found.matmul["bf16"] is None
    assert found.missing == {"bf16": "no kernel" if str(error) else "AttributeError"}
    assert found.matmul["fp32"]
    assert found.matmul["int8"]


def test_int8_falls_back_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: torch.Tensor) -> Run:
        raise RuntimeError("no oneDNN")

    monkeypatch.setattr(module, "_packed_int8", fail)
    out = module._int8_matmul(32, 32, 32)()
    assert isinstance(out, torch.Tensor)
    assert out.dtype is torch.int32


def test_slice_rate_is_the_sum_of_all_cores() -> None:
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        probe = module._Probe.prepare([one, other], lambda: partial(sum, range(1000)), work=1e9)
        probe.run_slice([one, other], seconds=0.01)
        alone = module._Probe.prepare([one], lambda: partial(sum, range(1000)), work=1e9)
        alone.run_slice([one], seconds=0.01)
    assert len(probe.rates) == len(alone.rates) == 1
    assert probe.rates[0] > 0


def test_best_rate_sums_the_best_calls_of_each_core() -> None:
    slow, fast = [0.004] * 990, [0.001] * 10
    probe = module._Probe([], 1e9, [slow + fast, [0.002] * 1000])
    assert probe.best_rate() == pytest.approx(1000 + 500)


def test_spread_is_that_of_the_slices() -> None:
    expected = Peak(value=6.0, low=1.8, typical=3.0, high=4.2)
    assert Peak.from_slices(6.0, [1.0, 5.0, 3.0]) == expected


@pytest.mark.parametrize("broken", ["lock", "write_atomic"])
def test_peaks_are_returned_even_if_they_cannot_be_cached(
    broken: str, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Root may write anywhere, so a directory takes the place of the file or its lock."""
    (path if broken == "write_atomic" else path.with_name(path.name + ".lock")).mkdir(parents=True)
    monkeypatch.setattr(module, "measure", lambda _: PEAKS)
    monkeypatch.setattr(logging.getLogger("ingot"), "propagate", True)
    assert peaks() == PEAKS
    assert "the peaks are not cached" in caplog.text


@pytest.mark.parametrize(
    ("memory", "l3", "cores", "total"),
    [
        (2**32, 2**25, 4, 2**29),  # a small machine: an eighth of 4 GiB
        (2**35, 2**25, 4, 2**29),  # an ordinary machine
        (2**35, 2**28, 4, 2**30),  # a large cache
        (2**35, None, 32, 2**31),  # many cores
        (2**30, 2**28, 1, 2**27),  # little memory
    ],
)
def test_buffer_size_is_between_caches_and_memory(
    memory: int, l3: int | None, cores: int, total: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    here = device.detect()
    machine = replace(here, memory=memory, cpu=replace(here.cpu, l3=l3, cores=cores))
    assert module._bytes_per_core(machine) * cores == total


def test_json_round_trip() -> None:
    assert Peaks.from_json(PEAKS.to_json()) == PEAKS
    assert json.loads(PEAKS.to_json())["matmul"]["int8"] is None


def test_cache_is_hit_and_refreshed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cached_peaks() is None
    first = peaks()
    assert Peaks.from_json(path.read_bytes()) == first
    again = peaks(refresh=True)
    assert again.measured > first.measured
    monkeypatch.setattr(module, "measure", refuse)
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
    monkeypatch.setattr(module, "measure", lambda _: PEAKS)
    text = json.dumps(json.loads(PEAKS.to_json()) | change).encode()
    with pytest.raises(msgspec.DecodeError):
        Peaks.from_json(text)
    paths.write_atomic(path, text)
    assert peaks() == PEAKS


@pytest.mark.parametrize("text", [b"", b"{", b"null", b"[1]", b"\xff\xfe", b'{"tokens": 3}'])
def test_corrupt_cache_is_measured_again(
    text: bytes, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measure", lambda _: PEAKS)
    paths.write_atomic(path, text)
    assert peaks() == PEAKS
    assert Peaks.from_json(path.read_bytes()) == PEAKS
