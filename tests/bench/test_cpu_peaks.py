"""Real measurements with tiny budgets and buffers: invariants of the numbers, not their values."""

from __future__ import annotations

import os
import timeit
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from threading import Thread

import pytest
import torch

from ingot.bench import cpu_peaks as module
from ingot.bench.cpu_peaks import measure
from ingot.bench.peaks import DTYPES, ROUNDS
from ingot.bench.timing import Run
from ingot.core import device

quick = partial(measure, budget=0.1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_bytes_per_core", lambda _: 2**23)


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
