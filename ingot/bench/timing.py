"""Times of calls, on machines that do other things too.

A time is stated as three quantiles, never as a mean: one preemption of 10 ms outweighs a
thousand calls of 10 us in a mean and leaves the median alone. p50 is what one usually gets; p20
and p80 show how steady it is.

Two things that are to be compared are timed in one run, in turns (`interleaved`). What slows a
machine down (another process, another tenant, heat) comes and goes within seconds, and in turns
it meets all of them alike. From one run to the next, the p50 of the same matmul differed by up
to 2.9x on our virtual machine.

A turn is many calls, not one, because a call runs on what the former one left in the caches. The
first of each turn finds what another callable left there, so it does not count.

What is timed must be finished when it returns. A call should take 10 us or more; reading the clock
costs about 0.1 us. A GPU computes while Python goes on: its calls are queued one behind the other
with its own events between them (`queued`), so that a time is what the GPU takes, or what Python
takes to ask for it if that is more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, Protocol, TypeAlias

import numpy as np

Turn: TypeAlias = "Callable[[Callable[[], object], float], list[float]]"


MOST_QUEUED = 1000  # calls: drivers hold about as many before they make Python wait


@dataclass(frozen=True)
class Timing:
    """How long a call takes, in seconds.

    >>> Timing.of([3.0, 1.0, 2.0])
    Timing(p20=1.4, p50=2.0, p80=2.6, count=3)
    """

    p20: float
    p50: float
    p80: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Sum up the times of single calls."""
        p20, p50, p80 = np.quantile(seconds, (0.2, 0.5, 0.8)).tolist()
        return cls(p20, p50, p80, len(seconds))


def turn(run: Callable[[], object], seconds: float) -> list[float]:
    """Call `run` again and again for about `seconds`, and return the time of each call.

    The first does not count, unless it takes the whole turn.

    >>> len(turn(lambda: sum(range(1000)), seconds=0.05)) > 1
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
    """A moment of a GPU, as torch's own events are."""

    def record(self) -> object:
        """When all that was asked for is done."""
        ...

    def synchronize(self) -> object:
        """Wait for that moment."""
        ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this one to another."""
        ...


def queued(run: Callable[[], object], seconds: float, event: Callable[[], Event]) -> list[float]:
    """As `turn`, for calls that return before they are finished; `event` makes events.

    The first two do not count: one tells how many fit the turn, one begins the queue.
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
    count = min(MOST_QUEUED, int(seconds / max(first, 1e-6)))
    return times(count + 1)[1:] if count else [first]


def timed(run: Callable[[], object], budget: float = 1.0, minimum: int = 10) -> Timing:
    """Time one callable for about `budget` seconds, and `minimum` calls at least.

    >>> timing = timed(lambda: sum(range(1000)), budget=0.01)
    >>> timing.p20 <= timing.p50 <= timing.p80
    True
    """
    return interleaved({"it": run}, budget, minimum)["it"]


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    budget: float = 1.0,
    minimum: int = 10,
    turn_seconds: float = 0.02,
    take: Turn = turn,
) -> dict[str, Timing]:
    """Time several callables in turns: `budget` seconds for each, `minimum` calls at least.

    Before that, each has one turn that does not count: compiling, allocating, first touches.

    >>> both = interleaved({"loop": lambda: sum(range(1000)), "closed": lambda: 999 * 500}, 0.01)
    >>> both["loop"].p50 > both["closed"].p50
    True
    """
    for run in runs.values():
        take(run, turn_seconds)
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = perf_counter() + budget * len(runs)
    while perf_counter() < end or min(map(len, times.values()), default=minimum) < minimum:
        for name, run in runs.items():
            times[name] += take(run, turn_seconds)
    return {name: Timing.of(seconds) for name, seconds in times.items()}
