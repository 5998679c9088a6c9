"""What this machine can do at most: bytes read per second, and matmul FLOPs per second.

    peaks().read_bandwidth.value         # GB/s of all cores together
    peaks().matmul["bf16"]               # a Peak in GFLOPS; None where the platform cannot

Speed is stated as a share of these, so they have to be near the hardware's limit and the same
tomorrow. Measured on 2 cores of a shared Xeon with AMX, most often with other work running:

**Every core on its own.** Each core has a thread, its own operands and short windows (below
1 ms) that it times without waiting for the others; rates are summed. All cores are busy at the
same time, so clocks and memory are shared as in real work. torch's own threads meet at the end
of each call, where one preempted core stops all: over ten runs beside other work, the p95 of
reading varied by 1.4x, and its p50 by 15x. The memory a core reads is touched first by that
core, which puts it on the core's own NUMA node.

**Reading** is `torch.mv` over fp32 rows of 256 KiB. BLAS reads several rows at once, and a core
needs several streams to fill its line buffers: 28.6 GB/s, 99 % of an AVX-512 loop with 8
streams (28.8), above one with a single stream (23.4), and above `dot` (26.9), numpy's `max`
(24.2), `sum` (22.7 in fp32, 22.3 in int64), `amax` (22.0). Others are not memory-bound at all:
`norm`, `count_nonzero`, `sum` of uint8, `dot` of bf16 (down to 0.2). Huge pages change nothing.

The buffer is walked round and round. From 256 MiB to 6 GiB its size made no difference, while
64 MiB gave 41 GB/s out of caches. We take four times the L3 cache, since elsewhere it may be
ours alone, and 64 MiB for each core, where groups of cores have an L3 of their own; but never
more than an eighth of the memory.

**Matmul** runs on operands that fit into a core's L2. Sizes are multiples of 32 but no powers of
two, whose rows fall into the same cache sets: bf16 reaches 1,100 GFLOPS at 1024, 1,900 at 2080,
2,550 at 480, 3,180 at 1472 x 480 x 480. int8 uses the oneDNN op with packed weights (5,150),
for `torch._int_mm` goes through an older oneDNN interface and reaches 3,100 at its best size,
hardly more than bf16. Both run on AMX, but oneDNN gets only about half of its limit: a loop
that never leaves the tile registers does 5,500 and 11,400 here. So a good AMX kernel may pass
100 % of this peak. In fp32 there is no such gap (329 of 344).

**Which quantile.** The peak of compute is p99 of the windows, what a core does when it is left
alone. A neighbour on the same physical core takes away more than half of AMX for milliseconds
to minutes, so that p50 varied by 2.2x between measurements while p99 stayed within 2 %. The
peak of reading is p50: bandwidth belongs to all cores and tenants together, and the sum of each
core's best moments may be more than they ever have at once. It stayed within 16 %. No quantile
helps while a neighbour never pauses: 2 of 30 measurements found bf16 at a third of its peak.
That is why `low`, `typical` and `high` are there to be shown.

With hundreds of cores Python's lock may get in the way; nobody has measured that yet.
"""

# pyright: basic

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ingot.bench.timing import turn
from ingot.core import log, paths
from ingot.core.device import Device, detect

Dtype: TypeAlias = Literal["fp32", "bf16", "int8"]
Rate: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Run: TypeAlias = Callable[[], object]
Edges: TypeAlias = NDArray[np.float64]

# In turns of 100 ms, each peak meets the same neighbours as the others.
_ROUNDS = 28
_MiB = 2**20
_ROW = 65536
_WINDOW = 4 * _MiB
_BEST = 0.995


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A limit in GB/s or GFLOPS, and what the windows it was taken from look like.

    `low`, `typical` and `high` are their p20, p50 and p80. Far apart, or far below `value`, they
    tell of other work on the machine.

    >>> Peak(value=28.6, low=25.2, typical=28.6, high=34.5).value
    28.6
    """

    value: Rate
    low: Rate
    typical: Rate
    high: Rate


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """All peaks of a machine; `missing` says why a matmul is None.

    >>> read = Peak(value=28.6, low=25.2, typical=28.6, high=34.5)
    >>> none = {"fp32": None, "bf16": None, "int8": None}
    >>> machine = Peaks(method=1, measured=datetime.now(UTC), read_bandwidth=read, matmul=none)
    >>> Peaks.from_json(machine.to_json()) == machine
    True
    """

    method: Literal[1]
    """Raised whenever the way of measuring changes, so that older files are not believed."""
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
        """Read it back; raises `msgspec.DecodeError` for anything that is not exactly this."""
        return msgspec.json.decode(text, type=cls)


def peaks(refresh: bool = False) -> Peaks:
    """Return this machine's peaks: measured once, then read from the cache.

    Another process that is measuring is waited for, since two at a time would halve each other's.

        peaks().read_bandwidth.value
        peaks(refresh=True)     # measures again
    """
    path = paths.cache("peaks", f"{detect().fingerprint}.json")
    with paths.lock(path):
        found = None if refresh else _load(path)
        if found is None:
            with log.progress("measuring this machine's peaks", _ROUNDS) as bar:
                found = measure(bar.advance)
            paths.write_atomic(path, found.to_json())
        return found


def measure(progress: Callable[[], object] = lambda: None, budget: float = 12.0) -> Peaks:
    """Measure all peaks in about `budget` seconds, and call `progress` 28 times meanwhile.

    with log.progress("measuring", 28) as bar:
        measure(bar.advance)
    """
    end = perf_counter() + budget
    threads = torch.get_num_threads()
    device = detect()
    cores = device.cpu.cores
    try:
        with ThreadPoolExecutor(cores, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            reading = _Probe.prepare(
                pool, cores, partial(_reader, _bytes_per_core(device)), _WINDOW
            )
            matmuls, missing = _prepare_matmuls(pool, cores)
            _take_turns(pool, [reading, *matmuls.values()], end, progress)
    finally:
        # A worker's setting is also that of every thread to come; ours here is both.
        torch.set_num_threads(threads)
    return Peaks(
        method=1,
        measured=datetime.now(UTC),
        read_bandwidth=reading.peak(),
        matmul={dtype: matmuls[dtype].peak() if dtype in matmuls else None for dtype in _MATMULS},
        missing=missing,
    )


@dataclass
class _Probe:
    """One measurement: what each core runs, how much work a call is, and when calls ended."""

    runs: list[Run]
    work: float
    turns: list[list[Edges]] = field(default_factory=list)
    """For each turn, for each core."""

    @classmethod
    def prepare(cls, pool: ThreadPoolExecutor, cores: int, make: Callable[[], Run], work: float):
        """Let each core make its own operands and call once; an error is the caller's."""

        def made(_: int) -> Run:
            run = make()
            run()
            return run

        return cls(list(pool.map(made, range(cores))), work)

    def take_turn(self, pool: ThreadPoolExecutor, seconds: float) -> None:
        """Run on all cores at the same time."""
        self.turns.append(list(pool.map(lambda run: _edges(run, seconds), self.runs)))

    def peak(self) -> Peak:
        every = [
            np.concatenate([np.diff(turn[core]) for turn in self.turns])
            for core in range(len(self.runs))
        ]
        best = _beside_busy_cores(self.turns, every)
        low, typical, high = (self._rate(every, share) for share in (0.2, 0.5, 0.8))
        return Peak(value=self._rate(best, _BEST), low=low, typical=typical, high=high)

    def _rate(self, times: list[Edges], share: float) -> float:
        """Sum up, in 10^9 per second, the rates that this share of each core's windows has."""
        return sum(self.work / float(np.quantile(core, 1 - share)) for core in times) / 1e9


def _edges(run: Run, seconds: float) -> Edges:
    """Take a turn, and return when each window began, and when the last one ended."""
    times = turn(run, seconds)
    return perf_counter() - np.append(np.cumsum(times[::-1])[::-1], 0.0)


def _beside_busy_cores(turns: list[list[Edges]], every: list[Edges]) -> list[Edges]:
    """Pick each core's windows in which the others together were as fast as usual, or faster."""
    usual = [1 / float(np.median(times)) for times in every]
    picked: list[list[Edges]] = [[] for _ in every]
    for turn_ in turns:
        clock, done = _progress(turn_)
        for core, edges in enumerate(turn_):
            times = np.diff(edges)
            others = (np.diff(np.interp(edges, clock, done)) - 1) / times
            picked[core].append(times[others >= 0.999 * (sum(usual) - usual[core])])
    each = [np.concatenate(times) for times in picked]
    return [chosen if len(chosen) else times for chosen, times in zip(each, every, strict=True)]


def _progress(turn_: list[Edges]) -> tuple[Edges, Edges]:
    """Return how many windows all cores together have done, as a line through (time, count)."""
    speeds = [1 / np.diff(edges) for edges in turn_]
    clock = np.concatenate([edges for core in turn_ for edges in (core[:-1], core[1:])])
    change = np.concatenate([speed for core in speeds for speed in (core, -core)])
    order = np.argsort(clock)
    clock, speed = clock[order], np.cumsum(change[order])
    return clock, np.append(0.0, np.cumsum(speed[:-1] * np.diff(clock)))


def _prepare_matmuls(
    pool: ThreadPoolExecutor, cores: int
) -> tuple[dict[Dtype, _Probe], dict[Dtype, str]]:
    probes: dict[Dtype, _Probe] = {}
    missing: dict[Dtype, str] = {}
    for dtype, (make, m, n, k) in _MATMULS.items():
        try:
            probes[dtype] = _Probe.prepare(pool, cores, partial(make, m, n, k), 2.0 * m * n * k)
        except (RuntimeError, AttributeError) as error:  # no kernel; no such op
            missing[dtype] = str(error).partition("\n")[0] or type(error).__name__
    return probes, missing


def _take_turns(
    pool: ThreadPoolExecutor, probes: list[_Probe], end: float, progress: Callable[[], object]
) -> None:
    """Give all probes their rounds; fewer than planned if one is so slow that time runs out."""
    seconds = max(0.0, end - perf_counter()) / _ROUNDS / len(probes)
    for done in range(_ROUNDS):
        if done == 0 or perf_counter() < end:
            for probe in probes:
                probe.take_turn(pool, seconds)
        progress()


def _bytes_per_core(device: Device) -> int:
    cores = device.cpu.cores
    wanted = max(512 * _MiB, 4 * (device.cpu.l3 or 0), 64 * _MiB * cores)
    return min(wanted, device.memory // 8) // cores


def _reader(size: int) -> Run:
    # torch.ones writes every page: untouched ones are all the same page of zeros, in cache.
    windows = torch.ones(max(1, size // _WINDOW), _WINDOW // 4 // _ROW, _ROW, dtype=torch.float32)
    vector = torch.ones(_ROW, dtype=torch.float32)
    following = cycle(windows.unbind())
    return lambda: torch.mv(next(following), vector)


def _float_matmul(dtype: torch.dtype) -> Callable[[int, int, int], Run]:
    def make(m: int, n: int, k: int) -> Run:
        random = torch.Generator().manual_seed(0)
        a = torch.randn(m, k, generator=random, dtype=torch.float32).to(dtype)
        b = torch.randn(k, n, generator=random, dtype=torch.float32).to(dtype)
        out = torch.empty(m, n, dtype=dtype)
        return lambda: torch.mm(a, b, out=out)

    return make


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
    """Multiply with packed weights, and scale the sums to int8 at the end, as quantized nets do."""
    n = b.shape[0]
    packed = torch.ops.onednn.qlinear_prepack(b, list(a.shape))
    scale, zero = torch.ones(n, dtype=torch.float32), torch.zeros(n, dtype=torch.int32)
    of_output = (None, 1.0, 0, torch.int8, "none", [], "")
    return lambda: torch.ops.onednn.qlinear_pointwise(a, 1.0, 0, packed, scale, zero, *of_output)


_MATMULS: dict[Dtype, tuple[Callable[[int, int, int], Run], int, int, int]] = {
    "fp32": (_float_matmul(torch.float32), 320, 320, 320),
    "bf16": (_float_matmul(torch.bfloat16), 1472, 480, 480),
    "int8": (_int8_matmul, 1024, 512, 512),
}


def _load(path: Path) -> Peaks | None:
    try:
        return Peaks.from_json(path.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
