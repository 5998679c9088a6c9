"""Timings of real calls, in order and number, and of calls on a fake clock."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from ingot.bench import timing as module
from ingot.bench.timing import (
    MAX_QUEUED,
    Timing,
    time_call,
    time_interleaved,
    time_queued,
    time_slice,
)


class Counter:
    """A call of a few microseconds that counts itself."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        sum(range(100))


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by a second whenever it is read."""
    clock = count()
    monkeypatch.setattr(module, "perf_counter", lambda: float(next(clock)))


def check(timing: Timing) -> None:
    assert 0 < timing.p20 <= timing.p50 <= timing.p80


def test_quantiles_are_those_of_the_calls() -> None:
    timing = Timing.from_seconds(np.random.default_rng(0).permutation(11).tolist())
    assert timing == Timing(2.0, 5.0, 8.0, 11)
    assert Timing.from_seconds([2.0]) == Timing(2.0, 2.0, 2.0, 1)


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize(("seconds", "calls"), [(0, 1), (1, 1), (2, 2), (10, 10)])
def test_slice_is_filled_without_gaps(seconds: float, calls: int) -> None:
    run = Counter()
    times = time_slice(run, seconds)
    assert run.calls == calls
    assert times == [1.0] * max(1, calls - 1)  # the first is discarded unless it is the only one


@pytest.mark.parametrize("minimum", [1, 7, 400])
def test_minimum_count_exceeds_the_budget(minimum: int) -> None:
    timing = time_call(Counter(), budget=0, minimum=minimum)
    assert timing.count >= minimum
    check(timing)


@pytest.mark.usefixtures("ticking")
def test_budget_allows_more_than_the_minimum() -> None:
    runs = {"a": Counter(), "b": Counter()}
    timings = time_interleaved(runs, budget=1000, minimum=1, slice_seconds=10)
    assert [timing.count for timing in timings.values()] == [87 * 9] * 2  # of 23 seconds a round


def test_interleaved_calls_alternate() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = time_interleaved(runs, budget=0, minimum=3, slice_seconds=0)
    assert order == list("abc") * 4  # the first round is discarded
    assert {name: timing.count for name, timing in timings.items()} == dict.fromkeys("abc", 3)


def test_interleaved_timings_keep_their_names() -> None:
    timings = time_interleaved(
        {"short": Counter(), "long": lambda: sum(range(100_000))}, budget=0.05
    )
    assert timings["short"].p50 < timings["long"].p50
    for timing in timings.values():
        check(timing)


def test_nothing_to_time_returns_nothing() -> None:
    assert time_interleaved({}) == {}


def test_errors_are_raised_to_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        time_call(lambda: 1 / 0)


class Moment:
    """An event of a GPU that takes 2 ms per call."""

    now = 0.0

    def record(self) -> None:
        self.at = Moment.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Moment) -> float:
        return end_event.at - self.at


def test_queued_calls_are_timed_by_device_events() -> None:
    calls: list[float] = []

    def run() -> None:
        # The first compiles.
        Moment.now += 2.0 if calls else 5.0
        calls.append(Moment.now)

    times = time_queued(run, 0.02, Moment)
    assert times == pytest.approx([2e-3] * 4)  # 20 ms hold 4 calls of 5
    assert len(calls) == 6
    assert time_queued(run, 0.001, Moment) == pytest.approx(
        [2e-3]
    )  # one call takes the whole slice


def test_queue_length_is_bounded() -> None:
    calls: list[int] = []
    assert len(time_queued(lambda: calls.append(1), 1.0, Moment)) == MAX_QUEUED


def test_interleaved_uses_the_given_timer() -> None:
    timings = time_interleaved(
        {"it": lambda: None}, 0.0, minimum=3, timer=lambda run, seconds: [4.0, 4.0]
    )
    assert timings["it"] == Timing(4.0, 4.0, 4.0, 4)
