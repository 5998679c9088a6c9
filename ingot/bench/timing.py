"""Times calls on machines that also do other work.

A time is reported as three quantiles, never as a mean: one preemption of 10 ms outweighs a thousand
calls of 10 us in a mean and leaves the median unchanged. p50 is the usual time; p20 and p80 show
how steady it is.

Callables that are compared are timed in one run, interleaved (`time_interleaved`). Whatever slows a
machine down (another process, another tenant, heat) comes and goes within seconds, and interleaving
spreads it evenly over all of them. From one run to the next, the p50 of the same matmul differed by
up to 2.9x on our virtual machine.

A time slice is many calls of one callable, because a call finds the caches as the previous one left
them. The first call of a slice finds what another callable left there, so it is discarded.

A timed call must be complete when it returns, and should take 10 us or more: reading the clock
costs about 0.1 us. A GPU computes asynchronously, so its calls are queued with events between them
(`time_queued`): the time is what the GPU takes, or what Python takes to launch it if that is
longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import numpy as np

Run: TypeAlias = "Callable[[], object]"
SliceTimer: TypeAlias = "Callable[[Run, float], list[float]]"
"""Calls a callable for about that many seconds and returns the seconds of each call."""

MAX_QUEUED = 1000  # calls: drivers queue about as many before a launch blocks


@dataclass(frozen=True)
class Timing:
    """Quantiles of the time of a call, in seconds.

    >>> Timing.from_seconds([3.0, 1.0, 2.0])
    Timing(p20=1.4, p50=2.0, p80=2.6, count=3)
    """

    p20: float
    p50: float
    p80: float
    count: int

    @classmethod
    def from_seconds(cls, seconds: Sequence[float]) -> Timing:
        """Summarize the times of single calls."""
        p20, p50, p80 = np.quantile(seconds, (0.2, 0.5, 0.8)).tolist()
        return cls(p20, p50, p80, len(seconds))


def round_measurement(value: float) -> float:
    """Round to four significant digits; the others are noise.

    >>> round_measurement(1234.56), round_measurement(0.00123456)
    (1235.0, 0.001235)
    """
    return float(f"{value:.4g}")


def time_slice(run: Run, seconds: float) -> list[float]:
    """Call `run` repeatedly for about `seconds` and return the time of each call.

    The first call is discarded, unless it takes the whole slice.

    >>> len(time_slice(lambda: sum(range(1000)), seconds=0.05)) > 1
    True
    """
    times: list[float] = []
    start = perf_counter()
    end = start + seconds
    while start < end or not times:
        run()
        start, before = perf_counter(), start
        times.append(start - before)
    return times[1:] or times


class Event(Protocol):
    """A timestamp in a GPU's queue, with the interface of `torch.Event`."""

    def record(self) -> object:
        """Take the time once everything launched so far is done."""
        ...

    def synchronize(self) -> object:
        """Wait until the time is taken."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this event to another."""
        ...


def time_queued(run: Run, seconds: float, event: Callable[[], Event]) -> list[float]:
    """Time calls that return before they are complete, as `time_slice` does; `event` makes events.

    The first two calls are discarded: one estimates how many fit the slice, one starts the queue.
    """

    def times(count: int) -> list[float]:
        moments = [event() for _ in range(count + 1)]
        moments[0].record()
        for moment in moments[1:]:
            run()
            moment.record()
        moments[-1].synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(moments)]

    (first,) = times(1)
    count = min(MAX_QUEUED, int(seconds / max(first, 1e-6)))
    return times(count + 1)[1:] if count else [first]


def slice_timer(device: str) -> SliceTimer:
    """Return the function that times calls on that device."""
    if device == "cpu":
        return time_slice
    import torch

    return partial(time_queued, event=lambda: torch.Event(device, enable_timing=True))


def time_call(run: Run, budget: float = 1.0, minimum: int = 10) -> Timing:
    """Time one callable for about `budget` seconds, and at least `minimum` calls.

    >>> timing = time_call(lambda: sum(range(1000)), budget=0.01)
    >>> timing.p20 <= timing.p50 <= timing.p80
    True
    """
    return time_interleaved({"it": run}, budget, minimum)["it"]


def time_interleaved(
    runs: Mapping[str, Run],
    budget: float = 1.0,
    minimum: int = 10,
    slice_seconds: float = 0.02,
    timer: SliceTimer = time_slice,
) -> dict[str, Timing]:
    """Time several callables slice by slice: `budget` seconds and at least `minimum` calls each.

    A first slice of each is discarded: compilation, allocation, page faults.

    >>> both = time_interleaved({"loop": lambda: sum(range(1000)), "sum": lambda: 999 * 500}, 0.01)
    >>> both["loop"].p50 > both["sum"].p50
    True
    """
    for run in runs.values():
        timer(run, slice_seconds)
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = perf_counter() + budget * len(runs)
    while perf_counter() < end or min(map(len, times.values()), default=minimum) < minimum:
        for name, run in runs.items():
            times[name] += timer(run, slice_seconds)
    return {name: Timing.from_seconds(seconds) for name, seconds in times.items()}
