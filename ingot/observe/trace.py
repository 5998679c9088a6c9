"""Divides the time of a window by what the process does, from a trace of torch.profiler.

The trace is a file of Chrome's JSON format, which Perfetto shows. One thread is looked at, the one
of the window's span. Each instant of the window belongs to the outermost op or waiting span that
runs then; an instant without one is Python's, with autograd and dispatch between ops:

    Python   |      |   |     |    |
    ops       aten::to   ingot::linear
    waiting                         ingot: wait for data

If a GPU runs kernels, an instant belongs to its kernel instead, and only one without a kernel to
what the thread waits for, or to Python.
"""

from __future__ import annotations

import gzip
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from pathlib import Path

import msgspec

from ingot.core import spans
from ingot.core.errors import IngotError

_OP = re.compile(r"(?!autograd::|torch::|profiler::)\w+::[\w.]+")
_AUTOGRAD = re.compile(r"GeneratedBackwardFor_(\w+?)_(\w+)_\w+(?<!Backward)")
"""The autograd function of a custom op, in Python, around its kernel."""
_COPIES = re.compile(
    r"aten::(to|_to_copy|copy_|contiguous|clone|cat|stack|fill_|zero_|resize_|(new_)?(empty|zeros|"
    r"ones|full)\w*)|Mem(cpy|set)\b.*"
)
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


class Kind(Enum):
    """What a process does with its time."""

    INGOT = "ingot's kernels"
    OTHER = "other ops"
    COPIES = "copies and fills"
    COMMUNICATION = "communication"
    DATA = "waiting for data"
    REQUESTS = "waiting for requests"
    CALLS = "short calls"
    """Ops on the CPU that take less than `SHORT_US`: most of it is the call itself."""
    PYTHON = "Python between ops"


SHORT_US, _SHORT_AUTOGRAD_US = 20.0, 100.0
LIMITS = {
    "compute": (Kind.INGOT, Kind.OTHER, Kind.COPIES),
    "communication": (Kind.COMMUNICATION,),
    "data": (Kind.DATA,),
    "requests": (Kind.REQUESTS,),
    "python": (Kind.CALLS, Kind.PYTHON),
}
"""What may be the bottleneck, and the kinds that belong to it."""


@dataclass(kw_only=True)
class OpTime:
    """All calls of an op in a window."""

    name: str
    kind: Kind
    count: int = 0
    seconds: float = 0.0
    allocated: int = 0
    """Bytes that it gets from torch's allocator; C++ kernels of ingot have their own."""


@dataclass(kw_only=True)
class WindowProfile:
    """What a thread did in a window."""

    steps: int
    seconds: float
    kinds: dict[Kind, float] = field(default_factory=dict[Kind, float])
    """Seconds of each kind; together those of the window."""
    ops: list[OpTime] = field(default_factory=list[OpTime])
    """Without spans; the slowest first."""

    def share(self, *kinds: Kind) -> float:
        """Return the share of the window."""
        return sum(self.kinds.get(kind, 0.0) for kind in kinds) / self.seconds

    def share_of(self, limit: str) -> float:
        """Return the share of all that belongs to one of `LIMITS`."""
        return self.share(*LIMITS[limit])

    @property
    def bottleneck(self) -> str:
        """The one of `LIMITS` that takes most of the time."""
        return max(LIMITS, key=self.share_of)


class _Args(msgspec.Struct):
    bytes: int = msgspec.field(name="Bytes", default=0)
    external_id: int = msgspec.field(name="External id", default=0)
    """Of an op, and of the kernels that it starts on a GPU."""


class TraceEvent(msgspec.Struct, gc=False):
    """One entry of a trace, in microseconds."""

    name: str = ""
    ph: str = ""
    cat: str = ""
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0
    args: _Args = msgspec.field(default_factory=_Args)

    @property
    def end(self) -> float:
        """When it ends."""
        return self.ts + self.dur


class _Trace(msgspec.Struct):
    traceEvents: list[TraceEvent]


def read_trace(path: Path) -> list[TraceEvent]:
    """Return the events of a file, which may be compressed with gzip."""
    content = path.read_bytes()
    try:
        content = gzip.decompress(content) if path.suffix == ".gz" else content
        return msgspec.json.decode(content, type=_Trace).traceEvents
    except (msgspec.MsgspecError, OSError, EOFError) as error:
        raise IngotError(
            f"{path}: not a trace of torch.profiler ({error})",
            hint="profile again; another program may have written the file",
        ) from error


def profile_window(events: Sequence[TraceEvent]) -> WindowProfile:
    """Return what the thread of `spans.WINDOW` did.

    >>> def event(name, ts, dur):
    ...     return TraceEvent(name=name, ph="X", cat="cpu_op", tid=1, ts=ts, dur=dur)
    >>> window = event(spans.WINDOW, 0, 100)
    >>> found = profile_window([window, event("ingot::silu", 10, 60), event("aten::empty", 20, 9)])
    >>> [(kind.value, round(found.share(kind), 2)) for kind in found.kinds]
    [("ingot's kernels", 0.6), ('Python between ops', 0.4)]
    """
    window = next((event for event in events if event.name == spans.WINDOW), None)
    if window is None or not window.dur:
        raise IngotError("the trace has no window", hint="profile again, for a longer time")
    inside = [e for e in events if window.ts <= e.ts < window.end and e is not window]
    own = sorted((e for e in inside if e.tid == window.tid), key=lambda e: (e.ts, -e.dur))
    total = window.dur * 1e-6
    device = [e for e in inside if e.ph == "X" and e.cat in _DEVICE]
    claims = _claims(own, device)
    kinds, ops = _add_up(claims, window.end, on_device=bool(device))
    kinds[Kind.PYTHON] = max(0.0, total - sum(kinds.values()))
    _add_allocations(claims, ops, [e for e in own if e.name == "[memory]" and e.args.bytes > 0])
    waits = (Kind.DATA, Kind.REQUESTS)
    return WindowProfile(
        steps=sum(event.name == spans.STEP for event in own),
        seconds=total,
        kinds={kind: kinds[kind] for kind in Kind if kinds[kind]},
        ops=sorted((o for o in ops.values() if o.kind not in waits), key=lambda o: -o.seconds),
    )


def _add_up(
    claims: Sequence[TraceEvent], window_end: float, *, on_device: bool
) -> tuple[dict[Kind, float], dict[str, OpTime]]:
    kinds: defaultdict[Kind, float] = defaultdict(float)
    ops: dict[str, OpTime] = {}
    for event in claims:
        kind, name = _kind(event) or Kind.OTHER, _op_name(event)  # a kernel of a GPU without an op
        seconds = (min(event.end, window_end) - event.ts) * 1e-6
        short = _SHORT_AUTOGRAD_US if name != event.name else SHORT_US
        is_short = not on_device and kind in LIMITS["compute"] and event.dur < short
        kinds[Kind.CALLS if is_short else kind] += seconds
        op = ops.setdefault(name, OpTime(name=name, kind=kind))
        op.count, op.seconds = op.count + 1, op.seconds + seconds
    return kinds, ops


def _add_allocations(
    claims: Sequence[TraceEvent], ops: dict[str, OpTime], allocations: Sequence[TraceEvent]
) -> None:
    starts = [event.ts for event in claims]
    for event in allocations:
        index = bisect_right(starts, event.ts) - 1
        if index >= 0 and event.ts <= claims[index].end:
            ops[_op_name(claims[index])].allocated += event.args.bytes


def _kind(event: TraceEvent) -> Kind | None:
    """Return what runs in an event; None for Python and for what only has others inside."""
    name = _op_name(event)
    if name in (spans.DATA, spans.REQUESTS):
        return Kind.DATA if name == spans.DATA else Kind.REQUESTS
    if name.startswith((spans.COMMUNICATION, "c10d::", "gloo:", "nccl", "rccl")):
        return Kind.COMMUNICATION
    if _COPIES.fullmatch(name):
        return Kind.COPIES
    if event.cat == "user_annotation" or not _OP.fullmatch(name):
        return None
    return Kind.INGOT if name.startswith("ingot") else Kind.OTHER


def _op_name(event: TraceEvent) -> str:
    """Return the name of an op, also for its autograd function."""
    found = _AUTOGRAD.fullmatch(event.name)
    return f"{found[1]}::{found[2]}" if found else event.name


def _claims(own: Sequence[TraceEvent], device: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Return what the instants of a window belong to, in order and without overlap."""
    timed = [e for e in own if e.ph == "X" and e.dur]
    if not device:
        return list(_outermost([e for i, e in enumerate(timed) if not _is_python(timed, i)]))
    names = {e.args.external_id: e.name for e in own if e.cat == "cpu_op"}
    kernels = [
        msgspec.structs.replace(kernel, name=names.get(kernel.args.external_id, kernel.name))
        for kernel in sorted(device, key=lambda e: e.ts)
    ]
    busy = list(_outermost(kernels))
    waits = [e for e in timed if _kind(e) in (Kind.DATA, Kind.REQUESTS)]
    return sorted([*busy, *_idle_parts(waits, busy)], key=lambda event: event.ts)


def _is_python(events: Sequence[TraceEvent], index: int) -> bool:
    """Return whether an event has no op of its own.

    An op of ingot runs Python if it calls more than allocations and copies: its autograd function,
    or a reference. Then the ops inside have their time, and the rest is Python's.
    """
    event = events[index]
    kind = _kind(event)
    if kind is not Kind.INGOT:
        return kind is None
    for inner in islice(events, index + 1, None):
        if inner.ts >= event.end:
            return False
        if _kind(inner) in (Kind.INGOT, Kind.OTHER):
            return True
    return False


def _outermost(events: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    """Yield the events that end after all before, from where those end."""
    end = float("-inf")
    for event in events:
        if event.end > end:
            yield _cut(event, max(event.ts, end), event.end)
            end = event.end


def _idle_parts(waits: Sequence[TraceEvent], busy: Sequence[TraceEvent]) -> Iterator[TraceEvent]:
    """Yield the parts of waiting spans in which nothing is busy."""
    for event in waits:
        start = event.ts
        for other in busy:
            if other.end > start and other.ts < event.end:
                if other.ts > start:
                    yield _cut(event, start, other.ts)
                start = other.end
        if start < event.end:
            yield _cut(event, start, event.end)


def _cut(event: TraceEvent, start: float, end: float) -> TraceEvent:
    return msgspec.structs.replace(event, ts=start, dur=end - start)
