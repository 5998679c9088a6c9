"""Times every op and compares it with the machine's roofline, with PyTorch and with torch.compile.

    bench = OpBench(peaks())
    for workload in select_workloads(["rms_norm"]):
        rows = bench.rows(workload)   # one per implementation, the default one first

**Implementations.** The op as a user calls it, dispatched to the best provider; the other providers
that support the call, without the dispatcher, which favours them by a few microseconds; `compile`,
which is `torch.compile` of the op's reference in the dtype of the arguments. Attention is compared
with `sdpa` alone: one call of `scaled_dot_product_attention` on keys that were laid out for it in
advance; the other providers store all scores, 9 GB for the longest prompts. All run under
`torch.inference_mode()`, interleaved (see `ingot.bench.timing`), on arguments larger than the
caches (see `ingot.bench.workloads`). On a GPU calls are queued and timed with events.

**Roofline.** The minimum time of a call is its bytes over the bandwidth or its FLOPs over the
matmul peak, whichever is longer; both are given by the op record's cost. `roofline_fraction` is
that time over p50.

- The bandwidth is the one available *at that time*: other tenants change it within seconds. So a
  probe is interleaved with the implementations. It reads as many bytes as the op moves (at least
  4 MiB) with `ingot.bench.bandwidth`, from another buffer larger than the caches and with torch's
  threads, as the ops do. `read_gbs` is its p50. A preempted core slows the probe like the op.
- The matmul peak is that of the dtype, since a core does not share its arithmetic. It bounds ops
  that multiply matrices: linear, attention, the losses with a weight. All others do too few FLOPs.

A fraction above 1 is possible: an output may stay in a cache, and with AMX the matmul peak is
oneDNN's, not the hardware's.

`vs_eager` and `vs_compile` are the speedups of a row over PyTorch's own function and over the
compiled reference; None where there is none.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.bench.bandwidth import ROW_BYTES, allocate, make_reader
from ingot.bench.peaks import Peaks
from ingot.bench.timing import Run, Timing, round_measurement, slice_timer, time_interleaved
from ingot.bench.workloads import Args, Workload, arena_size, argument_sets, new_arena
from ingot.core.device import detect
from ingot.core.log import logger
from ingot.ops.record import Cost, Op, registry

_MIN_READ_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class OpRow:
    """One implementation on one workload."""

    op: str
    family: str
    shape: str
    dtype: str
    provider: str
    p20_us: float
    p50_us: float
    p80_us: float
    gbs: float
    gflops: float
    read_gbs: float
    """Bandwidth that the interleaved probe measured."""
    bound: Literal["memory", "compute"]
    roofline_fraction: float
    vs_eager: float | None
    vs_compile: float | None
    batch_invariant: bool


@dataclass(frozen=True)
class Roofline:
    """Minimum time of a call in seconds, and the resource that bounds it.

    >>> Roofline.of(Cost(bytes=1000, flops=4000), bandwidth=1e3, flops=1e3)
    Roofline(seconds=4.0, bound='compute')
    >>> Roofline.of(Cost(bytes=1000, flops=4000), bandwidth=1e3, flops=None)
    Roofline(seconds=1.0, bound='memory')
    """

    seconds: float
    bound: Literal["memory", "compute"]

    @classmethod
    def of(cls, cost: Cost, bandwidth: float, flops: float | None) -> Roofline:
        """Return the longer of both times; `flops` per second is None if it is not a bound."""
        moving = cost.bytes / bandwidth
        computing = cost.flops / flops if flops else 0.0
        return cls(computing, "compute") if computing > moving else cls(moving, "memory")


class OpBench:
    """Times workloads in two buffers larger than the caches, which are allocated once.

    `seconds` is the time spent on each implementation, `size` the bytes of each buffer, `device`
    where they are.
    """

    def __init__(
        self,
        machine: Peaks,
        seconds: float = 0.3,
        size: int | None = None,
        device: str = "cpu",
    ) -> None:
        size = size or arena_size(detect(), device)
        self._machine, self._seconds = machine, seconds
        self._timer = slice_timer(device)
        self._arena = new_arena(size, device)
        self._read_rows = allocate(size, device)

    def rows(self, workload: Workload) -> list[OpRow]:
        """Time a workload: one row per implementation, first the op as it is called."""
        op = registry()[workload.op]
        with torch.inference_mode():
            args = argument_sets(workload, self._arena)
            cost = op.cost(*args[0])
            probe, probed_bytes = make_probe(self._read_rows, cost.bytes)
            runs = {"": probe, **dict(implementations(workload, args, self._arena))}
            timings = time_interleaved(runs, self._seconds, minimum=5, timer=self._timer)
        bandwidth = probed_bytes / timings.pop("").p50
        roofline = Roofline.of(cost, bandwidth, self._matmul_flops(op, workload.dtype))
        return _rows(op, workload, cost, roofline, bandwidth, timings)

    def _matmul_flops(self, op: Op[..., Any], dtype: str) -> float | None:
        multiplies = op.family == "attention" or op.name.startswith("linear")
        peak = self._machine.matmul.get(dtype) if multiplies else None  # pyright: ignore
        return peak and peak.value * 1e9


def implementations(
    workload: Workload, args: list[Args], arena: Tensor
) -> Iterator[tuple[str, Run]]:
    """Yield name and call of every implementation; first the provider that is dispatched to."""
    op = registry()[workload.op]
    complete = [op.with_defaults(each) for each in args]
    others = argument_sets(workload, arena, workload.sdpa) if workload.sdpa else args
    # One walk for all; else each would find in the L3 cache what the previous one has read.
    walk = cycle(zip(args, complete, others, strict=True))
    selected = op.select(*args[0])
    yield selected.name, lambda: op(*next(walk)[0])
    if workload.sdpa:
        causal = workload.shape.startswith("prefill")
        sdpa = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
        yield "sdpa", lambda: sdpa(*next(walk)[2])
        return
    for provider in op.providers.values():
        if provider is not selected and provider.supports(*complete[0]):
            yield provider.name, lambda forward=provider.forward: forward(*next(walk)[1])
    if compiled := compile_reference(op, args[0]):
        yield "compile", lambda: compiled(*next(walk)[2])


def compile_reference(op: Op[..., Any], args: Args) -> Callable[..., Any] | None:
    """Compile the reference for these arguments; return None, with a warning, if that fails."""
    torch._dynamo.reset()  # dynamo stops compiling a function after a number of shapes
    compiled = torch.compile(op.reference, dynamic=False)
    try:
        compiled(*args)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        logger(__name__).warning("torch.compile fails for '%s': %s", op.name, reason)
        return None
    return compiled


def make_probe(rows: Tensor, num_bytes: int) -> tuple[Run, int]:
    """Return a function that reads about `num_bytes` of these rows, and how many bytes it reads."""
    rows_per_call = -(-max(num_bytes, _MIN_READ_BYTES) // ROW_BYTES)
    rows_per_call = min(rows_per_call, max(1, len(rows) // 4))
    return make_reader(rows, rows_per_call), rows_per_call * ROW_BYTES


def _rows(
    op: Op[..., Any],
    workload: Workload,
    cost: Cost,
    roofline: Roofline,
    bandwidth: float,
    timings: dict[str, Timing],
) -> list[OpRow]:
    eager = timings.get("sdpa") or timings.get("aten")
    compiled = timings.get("compile")
    return [
        OpRow(
            op=op.name,
            family=op.family,
            shape=workload.shape,
            dtype=workload.dtype,
            provider=name,
            p20_us=round_measurement(timing.p20 * 1e6),
            p50_us=round_measurement(timing.p50 * 1e6),
            p80_us=round_measurement(timing.p80 * 1e6),
            gbs=round_measurement(cost.bytes / timing.p50 / 1e9),
            gflops=round_measurement(cost.flops / timing.p50 / 1e9),
            read_gbs=round_measurement(bandwidth / 1e9),
            bound=roofline.bound,
            roofline_fraction=round_measurement(roofline.seconds / timing.p50),
            vs_eager=eager and round_measurement(eager.p50 / timing.p50),
            vs_compile=compiled and round_measurement(compiled.p50 / timing.p50),
            batch_invariant=name in op.providers and op.providers[name].batch_invariant,
        )
        for name, timing in timings.items()
    ]
