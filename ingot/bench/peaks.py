"""What this machine can do at most: bytes read per second, and matmul FLOPs per second.

    peaks().read_bandwidth.value         # GB/s of all cores together
    peaks().matmul["bf16"]               # a Peak in GFLOPS; None where the platform cannot

Speed is stated as a share of these, so they have to be near the hardware's limit and the same
tomorrow, on machines that do other things too.

**Turns.** Four probes take turns of 10 ms, 280 each, so that all meet the same neighbours. In a
turn all cores work at the same time and share clocks and memory as in real work; its rate is
what they did together. The spread (p20, p50, p80 of the turns) tells what there usually was.

**The peak** of reading is the best turn: bandwidth belongs to all cores together, and the sum of
each one's best moments may be more than they ever have at once. A core's arithmetic is its own,
so the peak of matmul is the sum of what each core does in its best calls (p99.5), when no
neighbour takes the other half of it.

**Every core on its own.** Each core has a thread that stays on it, with operands of its own,
which it touched first (so they are on its NUMA node). torch's own threads meet at the end of
every call, and there one preempted core stops all.

**Reading** is `torch.mv` over float32 rows of 64 KiB. BLAS reads several rows at once, and a core
needs several streams to keep its line buffers full; `sum`, `amax` and `dot` have one or two.
The buffer is walked round and round. It is four times the L3 cache and 64 MiB for each core,
since caches may be shared or not; but never more than an eighth of the memory.

**Matmul** has operands that a core's L2 cache holds, of sizes that are multiples of 32 but no
powers of two, which are slow. int8 is oneDNN's op with packed weights; `torch._int_mm` is slower
than bf16. Where there is AMX, oneDNN reaches about half of what its registers could do, so a
good kernel may pass 100 % of these peaks.

What else was tried, with its figures, is in the log of the documentation.
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
from itertools import cycle
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch

from ingot.bench import timing
from ingot.core import log, paths
from ingot.core.device import Device, detect, parse_cpuinfo
from ingot.core.errors import IngotError

Dtype: TypeAlias = Literal["fp32", "bf16", "int8"]
Rate: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
Run: TypeAlias = Callable[[], object]
Cores: TypeAlias = list[ThreadPoolExecutor]
T = TypeVar("T")

ROUNDS = 280
_MiB = 2**20
_ROW = 16384
_WINDOW = 4 * _MiB


@dataclass(frozen=True, kw_only=True)
class Peak:
    """A limit in GB/s or GFLOPS, and what there was of it while it was measured.

    `low`, `typical` and `high` are p20, p50 and p80 of the turns. Far below `value`, they tell
    of other work on the machine.

    >>> Peak.of(42.4, turns=[30.0, 42.4, 41.0, 40.0, 38.0])
    Peak(value=42.4, low=36.4, typical=40.0, high=41.28)
    """

    value: Rate
    low: Rate
    typical: Rate
    high: Rate

    @classmethod
    def of(cls, value: float, turns: list[float]) -> Peak:
        """Give the peak with the spread of the turns' rates."""
        low, typical, high = (float(q) for q in np.quantile(turns, (0.2, 0.5, 0.8)).round(3))
        return cls(value=round(value, 3), low=low, typical=typical, high=high)


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """All peaks of a machine; `missing` says why a matmul is None.

    >>> read = Peak.of(42.4, turns=[38.0, 42.4])
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


def peaks(refresh: bool = False, place: str = "cpu") -> Peaks:
    """Return the peaks of this machine's CPU or GPU: measured once, then read from the cache.

    While another process measures, this one waits, since each would take from the other. Where
    the cache cannot be written, a warning says so and the next call measures again.

        peaks().read_bandwidth.value
        peaks(refresh=True)     # measures again
    """
    path = paths.cache("peaks", f"{detect().fingerprint}{'' if place == 'cpu' else '-gpu'}.json")
    found = None if refresh else _load(path)
    if found:
        return found

    def measured() -> Peaks:
        if place == "cpu":
            return measure(bar.advance)
        from ingot.bench import gpu

        return gpu.measure(place, bar.advance)

    with log.progress("measuring this machine's peaks", ROUNDS) as bar:
        try:
            with paths.lock(path):
                found = None if refresh else _load(path)  # who held the lock may have measured
                if found is None:
                    found = measured()
                    paths.write_atomic(path, found.to_json())
                return found
        except IngotError as error:
            log.logger(__name__).warning("the peaks are not kept: %s", error)
            return found or measured()


def known() -> Peaks | None:
    """Return this machine's peaks if they were measured before; nothing is measured."""
    return _load(paths.cache("peaks", f"{detect().fingerprint}.json"))


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
        read_bandwidth=Peak.of(max(reading.rates), reading.rates),
        matmul={dtype: _matmul_peak(matmuls.get(dtype)) for dtype in _MATMULS},
        missing=missing,
    )


@contextmanager
def reader(size: int) -> Generator[tuple[Run, int]]:
    """What has all cores read about `size` bytes of memory at each call; and how many.

    They are threads of its own: those of torch would look for work for a while after each call,
    on the cores of whatever is timed next.
    """
    threads = torch.get_num_threads()
    try:
        with ExitStack() as stack:
            cores = [stack.enter_context(_core(cpu)) for cpu in _cpus(detect().cpu.cores)]
            calls = max(1, round(size / len(cores) / _WINDOW))
            runs = _at_once(cores, [partial(_reader, calls * _WINDOW) for _ in cores])

            def pass_through(run: Run) -> None:
                for _ in range(calls):
                    run()

            passes = [partial(pass_through, run) for run in runs]
            yield lambda: _at_once(cores, passes), calls * _WINDOW * len(cores)
    finally:
        torch.set_num_threads(threads)


@dataclass
class _Probe:
    """One measurement: what each core runs, how much work a call is, how long each call of each
    core took, and the rate of each turn."""

    runs: list[Run]
    work: float
    times: list[list[float]]
    rates: list[float] = field(default_factory=list[float])

    @classmethod
    def prepare(cls, cores: Cores, make: Callable[[], Run], work: float) -> _Probe:
        """Let each core make its own operands and call once; an error is the caller's."""

        def made() -> Run:
            run = make()
            run()
            return run

        return cls(_at_once(cores, [made for _ in cores]), work, [[] for _ in cores])

    def take_turn(self, cores: Cores, seconds: float) -> None:
        """Run on all cores at the same time, and add up what they do."""
        turn = _at_once(cores, [partial(timing.turn, run, seconds) for run in self.runs])
        self.rates.append(sum(self.work * len(core) / sum(core) for core in turn) / 1e9)
        for times, new in zip(self.times, turn, strict=True):
            times += new

    def best_calls(self) -> float:
        """Sum up the rates of each core's best calls."""
        return sum(self.work / float(np.quantile(times, 0.005)) for times in self.times) / 1e9


def _matmul_peak(probe: _Probe | None) -> Peak | None:
    return probe and Peak.of(probe.best_calls(), probe.rates)


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
