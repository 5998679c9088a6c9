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

What is timed must be finished when it returns: a callable that starts work on an accelerator
has to wait for it. A call should take 10 us or more; reading the clock costs about 0.1 us.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np


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
) -> dict[str, Timing]:
    """Time several callables in turns: `budget` seconds for each, `minimum` calls at least.

    Before that, each has one turn that does not count: compiling, allocating, first touches.

    >>> both = interleaved({"loop": lambda: sum(range(1000)), "closed": lambda: 999 * 500}, 0.01)
    >>> both["loop"].p50 > both["closed"].p50
    True
    """
    for run in runs.values():
        turn(run, turn_seconds)
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = perf_counter() + budget * len(runs)
    while perf_counter() < end or min(map(len, times.values()), default=minimum) < minimum:
        for name, run in runs.items():
            times[name] += turn(run, turn_seconds)
    return {name: Timing.of(seconds) for name, seconds in times.items()}
