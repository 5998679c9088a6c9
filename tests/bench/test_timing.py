"""Times of calls: real ones in their order and number, and exact ones on a clock of our own."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from ingot.bench import timing as module
from ingot.bench.timing import MOST_QUEUED, Timing, interleaved, queued, timed, turn


class Counter:
    """A call that takes a few microseconds and is counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        sum(range(100))


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves by a second whenever it is read."""
    clock = count()
    monkeypatch.setattr(module, "perf_counter", lambda: float(next(clock)))


def check(timing: Timing) -> None:
    assert 0 < timing.p20 <= timing.p50 <= timing.p80


def test_the_quantiles_are_of_the_calls() -> None:
    timing = Timing.of(np.random.default_rng(0).permutation(11).tolist())
    assert timing == Timing(2.0, 5.0, 8.0, 11)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0, 1)


@pytest.mark.usefixtures("ticking")
@pytest.mark.parametrize(("seconds", "calls"), [(0, 1), (1, 1), (2, 2), (10, 10)])
def test_a_turn_is_filled_without_gaps(seconds: float, calls: int) -> None:
    run = Counter()
    times = turn(run, seconds)
    assert run.calls == calls
    assert times == [1.0] * max(1, calls - 1)  # the first does not count, unless it is the only


@pytest.mark.parametrize("minimum", [1, 7, 400])
def test_the_minimum_holds_beyond_the_budget(minimum: int) -> None:
    timing = timed(Counter(), budget=0, minimum=minimum)
    assert timing.count >= minimum
    check(timing)


@pytest.mark.usefixtures("ticking")
def test_the_budget_buys_more_than_the_minimum() -> None:
    runs = {"a": Counter(), "b": Counter()}
    timings = interleaved(runs, budget=1000, minimum=1, turn_seconds=10)
    assert [timing.count for timing in timings.values()] == [87 * 9] * 2  # of 23 seconds a round


def test_interleaved_calls_take_turns() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = interleaved(runs, budget=0, minimum=3, turn_seconds=0)
    assert order == list("abc") * 4  # the first round does not count
    assert {name: timing.count for name, timing in timings.items()} == dict.fromkeys("abc", 3)


def test_interleaved_timings_keep_their_names() -> None:
    timings = interleaved({"short": Counter(), "long": lambda: sum(range(100_000))}, budget=0.05)
    assert timings["short"].p50 < timings["long"].p50
    for timing in timings.values():
        check(timing)


def test_nothing_to_time_takes_no_time() -> None:
    assert interleaved({}) == {}


def test_an_error_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        timed(lambda: 1 / 0)


class Moment:
    """An event of a GPU that takes 2 ms for each call, whenever it is asked."""

    now = 0.0

    def record(self) -> None:
        self.at = Moment.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Moment) -> float:
        return end_event.at - self.at


def test_queued_calls_are_timed_by_the_devices_own_clock() -> None:
    calls: list[float] = []

    def run() -> None:
        # The first compiles.
        Moment.now += 2.0 if calls else 5.0
        calls.append(Moment.now)

    times = queued(run, 0.02, Moment)
    assert times == pytest.approx([2e-3] * 4)  # 20 ms hold 4 calls of 5
    assert len(calls) == 6
    assert queued(run, 0.001, Moment) == pytest.approx([2e-3])  # one takes the whole turn


def test_a_queue_is_not_longer_than_a_driver_holds() -> None:
    calls: list[int] = []
    assert len(queued(lambda: calls.append(1), 1.0, Moment)) == MOST_QUEUED


def test_turns_may_be_taken_another_way() -> None:
    found = interleaved({"it": lambda: None}, 0.0, minimum=3, take=lambda run, seconds: [4.0, 4.0])
    assert found["it"] == Timing(4.0, 4.0, 4.0, 4)
