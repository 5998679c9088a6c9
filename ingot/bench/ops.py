"""How fast each op is, beside the machine's limit, PyTorch and torch.compile.

    bench = Bench(peaks())
    for workload in chosen(["rms_norm"]):
        rows = bench.rows(workload)       # one a provider, the one that serves the call first

**Contenders.** The op as a user calls it, served by the best provider; the other providers that
support the call, without the dispatcher before them, which favours them by a few microseconds;
`compile`, which is `torch.compile` of the op's reference in the dtype of the arguments. Attention
is compared with `sdpa`: one call of `scaled_dot_product_attention` over keys that somebody laid
out for it beforehand; there is nothing to compile. All run under `torch.inference_mode()`, in
turns (see `ingot.bench.timing`), on arguments beyond the caches (see `ingot.bench.workloads`).

On a GPU it is the same, with calls queued one behind the other (`ingot.bench.timing`).

**The limit** of a call is the time its bytes or its FLOPs take at least, whichever is more; both
are the record's cost. `share_of_limit` is the limit over p50.

- Bytes are divided by the bandwidth *at that time*: what other tenants leave of it changes within
  seconds. So a probe takes turns with the contenders. It reads as many bytes as the op moves
  (4 MiB at least) as `ingot.bench.peaks` does, by `torch.mv` over rows of 64 KiB, from another
  buffer beyond the caches and with torch's threads, as the ops have them. `read_gbs` is its p50.
  Where one preempted core stops all, it stops the probe too.
- FLOPs are divided by the matmul peak of the dtype, which a core has to itself. They limit what
  multiplies matrices: linear, attention, the losses with a weight. All else has too few.

A share above 1 is possible: an output may stay in a cache, and where there is AMX, the matmul peak
is oneDNN's.

`vs_aten` and `vs_compile` are how many times faster than these a row is; None where there are none.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.bench.peaks import Peaks
from ingot.bench.timing import Timing, Turn, interleaved, queued, turn
from ingot.bench.workloads import Args, Workload, arena_size, copies, filled
from ingot.core.device import detect
from ingot.core.log import logger
from ingot.ops.op import Cost, Op, registry

Run: TypeAlias = Callable[[], object]

READER_ROW = 16384  # float32 of 64 KiB, as the peak's
_LEAST_READ = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class Row:
    """One contender on one workload."""

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
    """The bandwidth that the probe found meanwhile."""
    limit: Literal["memory", "compute"]
    share_of_limit: float
    vs_aten: float | None
    vs_compile: float | None
    batch_invariant: bool


@dataclass(frozen=True)
class Limit:
    """What a call takes at least, in seconds, and why.

    >>> Limit.of(Cost(bytes=1000, flops=4000), bandwidth=1e3, flops=1e3)
    Limit(seconds=4.0, by='compute')
    >>> Limit.of(Cost(bytes=1000, flops=4000), bandwidth=1e3, flops=None)
    Limit(seconds=1.0, by='memory')
    """

    seconds: float
    by: Literal["memory", "compute"]

    @classmethod
    def of(cls, cost: Cost, bandwidth: float, flops: float | None) -> Limit:
        """The larger of both times; `flops` a second is None where they are no limit."""
        moving = cost.bytes / bandwidth
        computing = cost.flops / flops if flops else 0.0
        return cls(computing, "compute") if computing > moving else cls(moving, "memory")


class Bench:
    """Times workloads, in two buffers beyond the caches that it makes once.

    `seconds` is how long each contender is timed, `size` the bytes of each buffer, `place` where
    they are.
    """

    def __init__(
        self,
        machine: Peaks,
        seconds: float = 0.3,
        size: int | None = None,
        place: str = "cpu",
    ) -> None:
        size = size or arena_size(detect(), place)
        self._machine, self._seconds = machine, seconds
        self._turn = turns(place)
        self._arena = filled(size, place)
        # torch.ones writes every page: those never written are one and the same page of zeros.
        self._read = torch.ones(size // 4 // READER_ROW, READER_ROW, device=place)

    def rows(self, workload: Workload) -> list[Row]:
        """Time it: a row for each contender, first the op as it is called."""
        op = registry()[workload.op]
        with torch.inference_mode():
            args = copies(workload, self._arena)
            cost = op.cost(*args[0])
            probe, probed_bytes = reader(self._read, cost.bytes)
            runs = dict(contenders(workload, args, self._arena))
            timings = interleaved({"": probe, **runs}, self._seconds, minimum=5, take=self._turn)
        bandwidth = probed_bytes / timings.pop("").p50
        limit = Limit.of(cost, bandwidth, self._matmul_flops(op, workload.dtype))
        return _rows(op, workload, cost, limit, bandwidth, timings)

    def _matmul_flops(self, op: Op[..., Any], dtype: str) -> float | None:
        multiplies = op.family == "attention" or op.name.startswith("linear")
        peak = self._machine.matmul.get(dtype) if multiplies else None  # pyright: ignore
        return peak and peak.value * 1e9


def turns(place: str) -> Turn:
    """How calls are timed there."""
    if place == "cpu":
        return turn
    return partial(queued, event=lambda: torch.Event(place, enable_timing=True))


def contenders(workload: Workload, args: list[Args], arena: Tensor) -> Iterator[tuple[str, Run]]:
    """Everybody who can do it, by name; the provider that serves the call first."""
    op = registry()[workload.op]
    complete = [op.with_defaults(each) for each in args]
    others = copies(workload, arena, workload.sdpa) if workload.sdpa else args
    # One walk for all: each would else find in the L3 cache what the one before it has read.
    walk = cycle(zip(args, complete, others, strict=True))
    serving = op.select(*args[0])
    yield serving.name, lambda: op(*next(walk)[0])
    for provider in op.providers.values():
        if provider is not serving and provider.supports(*complete[0]):
            yield provider.name, lambda forward=provider.forward: forward(*next(walk)[1])
    if workload.sdpa:
        causal = workload.shape.startswith("prefill")
        sdpa = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=True)
        yield "sdpa", lambda: sdpa(*next(walk)[2])
    elif compiled := compiled_reference(op, args[0]):
        yield "compile", lambda: compiled(*next(walk)[2])


def compiled_reference(op: Op[..., Any], args: Args) -> Callable[..., Any] | None:
    """The reference, compiled for these arguments; None, with a warning, where that fails."""
    torch._dynamo.reset()  # it gives up compiling after some shapes of one function
    compiled = torch.compile(op.reference, dynamic=False)
    try:
        compiled(*args)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        logger(__name__).warning("torch.compile fails for '%s': %s", op.name, reason)
        return None
    return compiled


def reader(memory: Tensor, wanted: int) -> tuple[Run, int]:
    """What reads about `wanted` bytes at each call, walking through the memory; and how many."""
    rows = -(-max(wanted, _LEAST_READ) // (4 * READER_ROW))
    rows = min(rows, max(1, len(memory) // 4))
    vector = torch.ones(READER_ROW, device=memory.device)
    windows = cycle(memory[: len(memory) // rows * rows].split(rows))
    return lambda: torch.mv(next(windows), vector), rows * 4 * READER_ROW


def _rows(
    op: Op[..., Any],
    workload: Workload,
    cost: Cost,
    limit: Limit,
    bandwidth: float,
    timings: dict[str, Timing],
) -> list[Row]:
    aten = timings.get("sdpa") or timings.get("aten")
    compiled = timings.get("compile")
    return [
        Row(
            op=op.name,
            family=op.family,
            shape=workload.shape,
            dtype=workload.dtype,
            provider=name,
            p20_us=_short(timing.p20 * 1e6),
            p50_us=_short(timing.p50 * 1e6),
            p80_us=_short(timing.p80 * 1e6),
            gbs=_short(cost.bytes / timing.p50 / 1e9),
            gflops=_short(cost.flops / timing.p50 / 1e9),
            read_gbs=_short(bandwidth / 1e9),
            limit=limit.by,
            share_of_limit=_short(limit.seconds / timing.p50),
            vs_aten=aten and _short(aten.p50 / timing.p50),
            vs_compile=compiled and _short(compiled.p50 / timing.p50),
            batch_invariant=name in op.providers and op.providers[name].batch_invariant,
        )
        for name, timing in timings.items()
    ]


def _short(value: float) -> float:
    """Four digits: more are noise."""
    return float(f"{value:.4g}")
