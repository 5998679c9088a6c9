"""What this machine can do at most: bytes read per second, and matmul FLOPs per second.

    peaks().read_bandwidth.value         # GB/s of all cores together
    peaks().matmul["bf16"]               # a Peak in GFLOPS; None where the platform cannot

Speed is stated as a share of these, so they have to be near the hardware's limit and the same
tomorrow. That is the difficulty: other processes and other tenants take away from a machine what
they like. The numbers below are from 2 cores of a shared Xeon with AMX, mostly beside other work.

**Every core on its own.** Each core has a thread, its own operands and windows of less than 1 ms,
which it times without waiting for the others; their rates are summed. All cores run at the same
time, so they share clocks and memory as in real work. torch's own threads meet at the end of
each call, and there one preempted core stops all: over ten runs beside other work, the p95 of
reading varied by 1.4x and its p50 by 15x. Threads stay on their cores, for Linux beside two other
processes may keep both of ours on one core for the whole measurement. And the memory that a core
reads is touched first by itself, which puts it on its own NUMA node.

**The best windows.** The peak is p99.5: what a core does when it is left alone. A neighbour on
the same physical core takes more than half of AMX for milliseconds or minutes, and neighbours
take a third of the bandwidth. So over sixteen measurements p50 varied by 2.9x (bf16), 3.0x
(int8), 1.3x (fp32) and 1.4x (reading). p99.5 varied by 1.02x, 1.03x, 1.00x and 1.15x over twelve,
with 5 to 7 processes on the 2 cores. `low`, `typical` and `high` tell how much of the peak there
usually was. No quantile helps while a neighbour never pauses: 2 of about 100 measurements found
AMX at a third and at two thirds of its peak.

**Not at another's expense.** Where the cores together can read more than the memory delivers, a
core is fastest while another one pauses, and the sum of such moments never was. So for reading a
window counts only if the other cores, together, were in it at least as fast as they usually are.
(On our machine two cores do not exhaust the memory, and it made a difference of 1 %.)

**Reading** is `torch.mv` over fp32 rows of 64 KiB. BLAS reads several rows at once, and a core
needs many streams to keep its line buffers full: 43 GB/s, 91 % of an AVX-512 loop with 16
streams (47.5), above that loop with 2 streams (41.7) or one (37.8, with prefetches 38.3). The
others have one stream or two: `dot` of two halves 40.0, numpy's `max` 35.4, `sum` 34.1 in fp32
and 32.5 in int64, `amax` 33.6. `norm`, `count_nonzero`, `sum` of bf16 or uint8 and `dot` of bf16
are bound by arithmetic (0.2 to 20). Huge pages made no difference.

The buffer is walked round and round. From 256 MiB to 6 GiB its size made no difference, while
64 MiB gave 40 % more, out of caches. We take four times the L3 cache, since elsewhere it may be
ours alone, and 64 MiB for each core, since groups of cores may each have their own; but never
more than an eighth of the memory.

**Matmul** has operands that a core's L2 cache holds. Sizes are multiples of 32 but no powers of
two, which are slow, perhaps because their rows fall into the same cache sets: bf16 reaches 2,070
GFLOPS at 512, 2,570 at 480 and 3,230 at 1472 x 480 x 480; with torch's threads 1,100 at 1024 and
2,450 at 1056. int8 is oneDNN's op with packed weights (5,200); `torch._int_mm` takes an older way
through oneDNN and reaches 3,100 at best, less than bf16. Both run on AMX, but oneDNN gets only
half of it: a loop that never leaves the tile registers does 5,500 and 11,400 here. So a good AMX
kernel may pass 100 % of these peaks. fp32 has no such gap (330 of 344 at 2.69 GHz).

With a hundred cores and more, Python's lock may get in the way; nobody has measured that yet.
"""

# pyright: basic

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ingot.bench import timing
from ingot.core import log, paths
from ingot.core.device import Device, detect, parse_cpuinfo

Dtype: TypeAlias = Literal["fp32", "bf16", "int8"]
Rate: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Run: TypeAlias = Callable[[], object]
Array: TypeAlias = NDArray[np.float64]
Cores: TypeAlias = list[ThreadPoolExecutor]
T = TypeVar("T")

# The four probes take turns of about 0.1 s, so that all of them meet the same neighbours.
ROUNDS = 28
_BEST = 0.995
_MiB = 2**20
_ROW = 16384
_WINDOW = 4 * _MiB


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A limit in GB/s or GFLOPS, and what there was of it while it was measured.

    `low`, `typical` and `high` are p20, p50 and p80 of its windows. Far apart, or far below
    `value`, they tell of other work on the machine.

    >>> Peak(value=42.4, low=28.1, typical=36.7, high=40.2).value
    42.4
    """

    value: Rate
    low: Rate
    typical: Rate
    high: Rate


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """All peaks of a machine; `missing` says why a matmul is None.

    >>> read = Peak(value=42.4, low=28.1, typical=36.7, high=40.2)
    >>> none = {"fp32": None, "bf16": None, "int8": None}
    >>> machine = Peaks(method=1, measured=datetime.now(UTC), read_bandwidth=read, matmul=none)
    >>> Peaks.from_json(machine.to_json()) == machine
    True
    """

    method: Literal[1]
    """To be raised when the way of measuring changes, so that older files are not believed."""
    measured: datetime
    read_bandwidth: Peak
    matmul: dict[Dtype, Peak | None]
    missing: dict[Dtype, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if set(self.matmul) != set(_MATMULS):
            raise ValueError(f"not the dtypes {', '.join(_MATMULS)}")

    def to_json(self) -> bytes:
        """Write it as readable JSON."""
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> Peaks:
        """Read it back; anything that cannot be one is a `msgspec.DecodeError`."""
        return msgspec.json.decode(text, type=cls)


def peaks(refresh: bool = False) -> Peaks:
    """Return this machine's peaks: measured once, then read from the cache.

    While another process measures, this one waits, since each would take from the other.

        peaks().read_bandwidth.value
        peaks(refresh=True)     # measures again
    """
    path = paths.cache("peaks", f"{detect().fingerprint}.json")
    with paths.lock(path):
        found = None if refresh else _load(path)
        if found is None:
            with log.progress("measuring this machine's peaks", ROUNDS) as bar:
                found = measure(bar.advance)
            paths.write_atomic(path, found.to_json())
        return found


def measure(progress: Callable[[], object] = lambda: None, budget: float = 12.0) -> Peaks:
    """Measure all peaks in about `budget` seconds; `progress` is called ROUNDS times meanwhile.

    With a bar on the terminal:

        with log.progress("measuring", ROUNDS) as bar:
            measure(bar.advance)
    """
    end = perf_counter() + budget
    threads = torch.get_num_threads()
    device = detect()
    try:
        with ExitStack() as stack:
            cores = [stack.enter_context(_core(cpu)) for cpu in _cpus(device.cpu.cores)]
            reading = _Probe.prepare(cores, partial(_reader, _bytes_per_core(device)), _WINDOW)
            matmuls, missing = _prepare_matmuls(cores)
            _take_turns(cores, [reading, *matmuls.values()], end, progress)
    finally:
        # What a thread sets is also the default of threads to come; set here, it is both again.
        torch.set_num_threads(threads)
    return Peaks(
        method=1,
        measured=datetime.now(UTC),
        read_bandwidth=reading.peak(shared=True),
        matmul={dtype: matmuls[dtype].peak() if dtype in matmuls else None for dtype in _MATMULS},
        missing=missing,
    )


@dataclass
class _Probe:
    """One measurement: what each core runs, how much work a call is, and when the calls were."""

    runs: list[Run]
    work: float
    turns: list[list[Array]] = field(default_factory=list)
    """For each turn, for each core: when each window began, and when the last one ended."""

    @classmethod
    def prepare(cls, cores: Cores, make: Callable[[], Run], work: float) -> _Probe:
        """Let each core make its own operands and call once; an error is the caller's."""

        def made() -> Run:
            run = make()
            run()
            return run

        return cls(_at_once(cores, [made for _ in cores]), work)

    def take_turn(self, cores: Cores, seconds: float) -> None:
        """Run on all cores at the same time."""
        self.turns.append(_at_once(cores, [partial(_edges, run, seconds) for run in self.runs]))

    def peak(self, shared: bool = False) -> Peak:
        """Sum up the cores; `shared` if they draw on one and the same resource."""
        cores = zip(*self.turns, strict=True)
        every = [np.concatenate([np.diff(edges) for edges in core]) for core in cores]
        low, typical, high = (self._rate(every, share) for share in (0.2, 0.5, 0.8))
        counted = _beside_busy_cores(self.turns, every) if shared else every
        value = max(self._rate(counted, _BEST), typical)
        return Peak(value=value, low=low, typical=typical, high=high)

    def _rate(self, times: list[Array], share: float) -> float:
        """Sum up, in 10^9 per second, the rates that this share of each core's windows is below."""
        return sum(self.work / float(np.quantile(core, 1 - share)) for core in times) / 1e9


def _cpus(count: int) -> list[int | None]:
    """Choose a CPU for each of our threads; None lets the system choose."""
    if sys.platform != "linux":
        return [None] * count
    core_of = parse_cpuinfo(Path("/proc/cpuinfo").read_text()).core_of
    chosen = _one_per_core(os.sched_getaffinity(0), core_of)[:count]
    return [*chosen, *[None] * (count - len(chosen))]


def _one_per_core(cpus: Iterable[int], core_of: Mapping[int, tuple[str, str]]) -> list[int]:
    first = {core_of.get(cpu, cpu): cpu for cpu in sorted(cpus, reverse=True)}
    return sorted(first.values())


def _core(cpu: int | None) -> ThreadPoolExecutor:
    """Start a thread that stays on that CPU."""

    def settle() -> None:
        torch.set_num_threads(1)
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})  # of this thread

    return ThreadPoolExecutor(1, initializer=settle)


def _at_once(cores: Cores, calls: Iterable[Callable[[], T]]) -> list[T]:
    futures = [core.submit(call) for core, call in zip(cores, calls, strict=True)]
    return [future.result() for future in futures]


def _edges(run: Run, seconds: float) -> Array:
    times = timing.turn(run, seconds)
    return perf_counter() - np.append(np.cumsum(times[::-1])[::-1], 0.0)


def _beside_busy_cores(turns: list[list[Array]], every: list[Array]) -> list[Array]:
    """Pick each core's windows in which the others together were as fast as usual, or faster.

    A core that has no such window keeps all.
    """
    usual = np.array([1 / np.median(times) for times in every])
    picked: list[list[Array]] = [[] for _ in every]
    for turn in turns:
        clock, done = _progress(turn)
        for core, edges in enumerate(turn):
            times = np.diff(edges)
            others = (np.diff(np.interp(edges, clock, done)) - 1) / times
            enough = 0.999 * (usual.sum() - usual[core])  # rounding
            picked[core].append(times[others >= enough])
    each = [np.concatenate(times) for times in picked]
    return [chosen if len(chosen) else times for chosen, times in zip(each, every, strict=True)]


def _progress(turn: list[Array]) -> tuple[Array, Array]:
    """Return how many windows all cores together have done: a line through (time, count)."""
    speeds = [1 / np.diff(edges) for edges in turn]
    clock = np.concatenate([ends for edges in turn for ends in (edges[:-1], edges[1:])])
    change = np.concatenate([change for speed in speeds for change in (speed, -speed)])
    order = np.argsort(clock)
    clock, speed = clock[order], np.cumsum(change[order])
    return clock, np.append(0.0, np.cumsum(speed[:-1] * np.diff(clock)))


def _prepare_matmuls(cores: Cores) -> tuple[dict[Dtype, _Probe], dict[Dtype, str]]:
    probes: dict[Dtype, _Probe] = {}
    missing: dict[Dtype, str] = {}
    for dtype, (make, m, n, k) in _MATMULS.items():
        try:
            probes[dtype] = _Probe.prepare(cores, partial(make, m, n, k), 2 * m * n * k)
        except (RuntimeError, AttributeError) as error:  # no kernel; no such op
            missing[dtype] = str(error).partition("\n")[0] or type(error).__name__
    return probes, missing


def _take_turns(
    cores: Cores, probes: list[_Probe], end: float, progress: Callable[[], object]
) -> None:
    """Give all probes their rounds; fewer if one of them is so slow that time runs out."""
    seconds = max(0.0, end - perf_counter()) / ROUNDS / len(probes)
    for done in range(ROUNDS):
        if done == 0 or perf_counter() < end:
            for probe in probes:
                probe.take_turn(cores, seconds)
        progress()


def _bytes_per_core(device: Device) -> int:
    cores = device.cpu.cores
    wanted = max(512 * _MiB, 4 * (device.cpu.l3 or 0), 64 * _MiB * cores)
    return min(wanted, device.memory // 8) // cores


def _reader(size: int) -> Run:
    # torch.ones writes every page: those never written are one and the same page of zeros.
    windows = torch.ones(max(1, size // _WINDOW), _WINDOW // 4 // _ROW, _ROW, dtype=torch.float32)
    vector = torch.ones(_ROW, dtype=torch.float32)
    following = cycle(windows.unbind())
    return lambda: torch.mv(next(following), vector)


def _float_matmul(dtype: torch.dtype, m: int, n: int, k: int) -> Run:
    random = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=random, dtype=torch.float32).to(dtype)
    b = torch.randn(k, n, generator=random, dtype=torch.float32).to(dtype)
    out = torch.empty(m, n, dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def _int8_matmul(m: int, n: int, k: int) -> Run:
    random = torch.Generator().manual_seed(0)
    a = torch.randint(-128, 128, (m, k), generator=random, dtype=torch.int8)
    b = torch.randint(-128, 128, (n, k), generator=random, dtype=torch.int8)
    try:
        run = _packed_int8(a, b)
        run()
        return run
    except (RuntimeError, AttributeError):  # a platform without oneDNN
        return lambda: torch._int_mm(a, b.t())  # pyright: ignore[reportPrivateImportUsage]


def _packed_int8(a: torch.Tensor, b: torch.Tensor) -> Run:
    """Multiply by packed weights, and scale the sums to int8, as quantized models do."""
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


def _load(path: Path) -> Peaks | None:
    try:
        return Peaks.from_json(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
