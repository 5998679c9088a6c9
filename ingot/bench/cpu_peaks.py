"""Measures the peaks of the CPU: bytes read per second, and matmul FLOPs per second.

Speeds are stated as a fraction of these, so they have to be close to the hardware's peak and
repeatable, also on machines that do other work.

**Interleaving.** Four probes alternate in time slices of 10 ms, 280 each, so that all see the same
load from other processes. In a slice all cores work at the same time and share clocks and memory as
in real work; its rate is what they achieve together. The spread (p20, p50, p80 of the slices) shows
what was usual.

**The peak** of reading is the best slice: bandwidth is shared by all cores, and the sum of each
core's best moments may be more than they ever get at once. Arithmetic is not shared, so the peak of
matmul is the sum over the cores of each one's best calls (p99.5), when no other tenant uses the
sibling hyperthread.

**One thread per core.** Each core has a pinned thread with its own operands, which the thread
touched first (so they are on its NUMA node). torch's own threads synchronize at the end of every
call, where one preempted core stalls all.

**Reading** is `ingot.bench.bandwidth` over a buffer that is walked round and round. The buffer is
four times the L3 cache and 64 MiB per core, since caches may be shared or not; but never more than
an eighth of the memory.

**Matmul** operands fit a core's L2 cache; their sizes are multiples of 32 but not powers of two,
which are slow. int8 is oneDNN's op with packed weights; `torch._int_mm` is slower than bf16. With
AMX, oneDNN reaches about half of the hardware's peak, so a good kernel may exceed 100 % of these.

The engineering log has the alternatives that were tried, with their numbers.
"""

# pyright: basic

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from ingot.bench.bandwidth import ROW_BYTES, allocate, make_reader
from ingot.bench.peaks import ROUNDS, Dtype, Peak, Peaks
from ingot.bench.timing import Run, time_slice
from ingot.core.device import Device, detect, parse_cpuinfo

Cores: TypeAlias = list[ThreadPoolExecutor]
T = TypeVar("T")

_MiB = 2**20
_WINDOW_BYTES = 4 * _MiB
_WINDOW_ROWS = _WINDOW_BYTES // ROW_BYTES


def measure(progress: Callable[[], object] = lambda: None, budget: float = 12.0) -> Peaks:
    """Measure all peaks in about `budget` seconds; `progress` is called ROUNDS times.

    With a progress bar on the terminal:

        with log.progress("measuring", ROUNDS) as bar:
            measure(bar.advance)
    """
    end = perf_counter() + budget
    threads = torch.get_num_threads()
    device = detect()
    try:
        with ExitStack() as stack:
            cores = [stack.enter_context(_core(cpu)) for cpu in _cpus(device.cpu.cores)]
            make = partial(_make_reader, _bytes_per_core(device))
            reading = _Probe.prepare(cores, make, _WINDOW_BYTES)
            matmuls, missing = _prepare_matmuls(cores)
            _run_probes(cores, [reading, *matmuls.values()], end, progress)
    finally:
        # A thread's setting also becomes the default of new threads; reset both.
        torch.set_num_threads(threads)
    return Peaks(
        method=1,
        measured=datetime.now(UTC),
        read_bandwidth=Peak.from_slices(max(reading.rates), reading.rates),
        matmul={dtype: _matmul_peak(matmuls.get(dtype)) for dtype in _MATMULS},
        missing=missing,
    )


@contextmanager
def reader_on_all_cores(size: int) -> Generator[tuple[Run, int]]:
    """Yield a function that reads about `size` bytes on all cores, and how many bytes it reads.

    It has its own threads: torch's would spin for a while after each call, on the cores that the
    next timed call needs.
    """
    threads = torch.get_num_threads()
    try:
        with ExitStack() as stack:
            cores = [stack.enter_context(_core(cpu)) for cpu in _cpus(detect().cpu.cores)]
            calls = max(1, round(size / len(cores) / _WINDOW_BYTES))
            make = partial(_make_reader, calls * _WINDOW_BYTES)
            runs = _run_on_cores(cores, [make for _ in cores])

            def read_all(run: Run) -> None:
                for _ in range(calls):
                    run()

            passes = [partial(read_all, run) for run in runs]
            yield lambda: _run_on_cores(cores, passes), calls * _WINDOW_BYTES * len(cores)
    finally:
        torch.set_num_threads(threads)


@dataclass
class _Probe:
    """One measurement: the function of each core, the work of a call, the seconds of every call of
    every core, and the rate of each time slice."""

    runs: list[Run]
    work: float
    times: list[list[float]]
    rates: list[float] = field(default_factory=list[float])

    @classmethod
    def prepare(cls, cores: Cores, make: Callable[[], Run], work: float) -> _Probe:
        """Let each core make its own operands and call once; errors are raised to the caller."""

        def make_and_run() -> Run:
            run = make()
            run()
            return run

        return cls(_run_on_cores(cores, [make_and_run for _ in cores]), work, [[] for _ in cores])

    def run_slice(self, cores: Cores, seconds: float) -> None:
        """Run on all cores at the same time, and add up their rates."""
        new_times = _run_on_cores(cores, [partial(time_slice, run, seconds) for run in self.runs])
        self.rates.append(sum(self.work * len(core) / sum(core) for core in new_times) / 1e9)
        for times, new in zip(self.times, new_times, strict=True):
            times += new

    def best_rate(self) -> float:
        """Return the sum of the rates of each core's best calls."""
        return sum(self.work / float(np.quantile(times, 0.005)) for times in self.times) / 1e9


def _matmul_peak(probe: _Probe | None) -> Peak | None:
    return probe and Peak.from_slices(probe.best_rate(), probe.rates)


def _cpus(count: int) -> list[int | None]:
    """Choose a CPU for each thread; None leaves the choice to the system."""
    if sys.platform != "linux":
        return [None] * count
    core_of = parse_cpuinfo(Path("/proc/cpuinfo").read_text()).core_of
    chosen = _one_per_core(os.sched_getaffinity(0), core_of)[:count]
    return [*chosen, *[None] * (count - len(chosen))]


def _one_per_core(cpus: Iterable[int], core_of: Mapping[int, tuple[str, str]]) -> list[int]:
    first = {core_of.get(cpu, cpu): cpu for cpu in sorted(cpus, reverse=True)}
    return sorted(first.values())


def _core(cpu: int | None) -> ThreadPoolExecutor:
    """Start a thread that is pinned to that CPU."""

    def pin() -> None:
        torch.set_num_threads(1)
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})  # 0: this thread

    return ThreadPoolExecutor(1, initializer=pin)


def _run_on_cores(cores: Cores, calls: Iterable[Callable[[], T]]) -> list[T]:
    futures = [core.submit(call) for core, call in zip(cores, calls, strict=True)]
    return [future.result() for future in futures]


def _prepare_matmuls(cores: Cores) -> tuple[dict[Dtype, _Probe], dict[Dtype, str]]:
    probes: dict[Dtype, _Probe] = {}
    missing: dict[Dtype, str] = {}
    for dtype, (make, m, n, k) in _MATMULS.items():
        try:
            probes[dtype] = _Probe.prepare(cores, partial(make, m, n, k), 2 * m * n * k)
        except (RuntimeError, AttributeError) as error:  # no kernel; no such op
            missing[dtype] = str(error).partition("\n")[0] or type(error).__name__
    return probes, missing


def _run_probes(
    cores: Cores, probes: list[_Probe], end: float, progress: Callable[[], object]
) -> None:
    """Run all rounds of all probes; fewer if a slow probe uses up the time."""
    seconds = max(0.0, end - perf_counter()) / ROUNDS / len(probes)
    for done in range(ROUNDS):
        if done == 0 or perf_counter() < end:
            for probe in probes:
                probe.run_slice(cores, seconds)
        progress()


def _bytes_per_core(device: Device) -> int:
    cores = device.cpu.cores
    wanted = max(512 * _MiB, 4 * (device.cpu.l3 or 0), 64 * _MiB * cores)
    return min(wanted, device.memory // 8) // cores


def _make_reader(size: int) -> Run:
    return make_reader(allocate(max(size, _WINDOW_BYTES)), _WINDOW_ROWS)


def _float_matmul(dtype: torch.dtype, m: int, n: int, k: int) -> Run:
    random = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=random, dtype=torch.float32).to(dtype)
    b = torch.randn(k, n, generator=random, dtype=torch.float32).to(dtype)
    out = torch.empty(m, n, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def _int8_matmul(m: int, n: int, k: int) -> Run:
    random = torch.Generator().manual_seed(0)
    a = torch.randint(0, 128, (m, k), generator=random, dtype=torch.int8)
    b = torch.randint(-128, 128, (n, k), generator=random, dtype=torch.int8)
    try:
        # VNNI multiplies unsigned by signed; for signed activations, oneDNN has a kernel with AMX
        # only and otherwise takes 13 s for one call.
        run = _packed_int8(a.view(torch.uint8), b)
        run()
        return run
    except (RuntimeError, AttributeError):  # a platform without oneDNN
        return lambda: torch._int_mm(a, b.t())  # pyright: ignore[reportPrivateImportUsage]


def _packed_int8(a: torch.Tensor, b: torch.Tensor) -> Run:
    """Multiply by packed weights and requantize to int8, as quantized models do."""
    n = b.shape[0]
    packed = torch.ops.onednn.qlinear_prepack(b, list(a.shape))
    scale, zero = torch.ones(n, dtype=torch.float32), torch.zeros(n, dtype=torch.int32)
    output = (None, 1.0, 0, torch.int8, "none", [], "")
    return lambda: torch.ops.onednn.qlinear_pointwise(a, 1.0, 0, packed, scale, zero, *output)


_MATMULS: dict[Dtype, tuple[Callable[[int, int, int], Run], int, int, int]] = {
    "fp32": (partial(_float_matmul, torch.float32), 320, 320, 320),
    "bf16": (partial(_float_matmul, torch.bfloat16), 1472, 480, 480),
    "int8": (_int8_matmul, 1024, 512, 512),
}
