from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError
from ingot.serving.machine import (
    ENGINE_WEIGHT,
    MachineConfig,
    Process,
    ProcessCosts,
    SharedCores,
    speeds,
)

Works = list[tuple[float, float, bool]]
"""When each begins, its seconds, and whether it is an engine's."""


def run_machine(cores: int, works: Works) -> list[float]:
    """When each work ends."""
    machine, ends = SharedCores(cores), [math.nan] * len(works)
    upcoming = sorted(range(len(works)), key=lambda n: works[n][0])
    while upcoming or machine.next_end < math.inf:
        if upcoming and works[upcoming[0]][0] <= machine.next_end:
            number = upcoming.pop(0)
            begin, seconds, is_engine = works[number]
            end: Any = partial(ends.__setitem__, number)
            machine.begin(begin, seconds, end, is_engine=is_engine)
        else:
            now = machine.next_end
            machine.pop()(now)  # pyright: ignore
    return ends


def fair_speeds(cores: int, weights: list[float]) -> list[float]:
    """Share the cores by weight, and what one cannot use among the rest."""
    speeds = [0.0] * len(weights)
    while cores > sum(speeds) + 1e-9 and min(speeds, default=1) < 1:
        rest = cores - sum(speeds)
        total = sum(w for w, s in zip(weights, speeds, strict=True) if s < 1)
        grown = [
            s if s >= 1 else s + rest * w / total for w, s in zip(weights, speeds, strict=True)
        ]
        speeds = [min(1.0, s) for s in grown]
    return speeds


def share_in_slices(cores: int, works: Works, slice_s: float) -> list[float]:
    """The same, with the remaining seconds of each work instead of a virtual time."""
    left, ends = [seconds for _, seconds, _ in works], [math.nan] * len(works)
    now = 0.0
    while any(map(math.isnan, ends)):
        active = [n for n, work in enumerate(works) if work[0] <= now and math.isnan(ends[n])]
        weights = [ENGINE_WEIGHT if works[n][2] else 1.0 for n in active]
        now += slice_s
        for n, speed in zip(active, fair_speeds(cores, weights), strict=True):
            left[n] -= slice_s * speed
            if left[n] <= 1e-9:
                ends[n] = now
    return ends


@given(
    st.integers(1, 4),
    st.lists(
        st.tuples(st.integers(0, 40), st.integers(1, 30), st.booleans()), min_size=1, max_size=8
    ),
)
def test_works_share_the_cores(cores: int, works: list[tuple[int, int, bool]]) -> None:
    slice_s = 1 / 64
    scaled = [(begin / 8, seconds / 8, is_engine) for begin, seconds, is_engine in works]
    ends = run_machine(cores, scaled)
    for end, expected in zip(ends, share_in_slices(cores, scaled, slice_s), strict=True):
        assert abs(end - expected) <= slice_s * (len(works) + 1) * (1 + 1 / ENGINE_WEIGHT)
    # No core is idle while a work waits for one, and none does two things at a time.
    first, seconds = min(scaled)[0], [seconds for _, seconds, _ in scaled]
    assert max(ends) >= first + sum(seconds) / cores - 1e-9
    for end, (begin, alone, _) in zip(ends, scaled, strict=True):
        assert end >= begin + alone - 1e-9


@given(st.integers(1, 5), st.integers(0, 9), st.integers(0, 9))
def test_speeds_share_the_cores_by_weight(cores: int, engines: int, others: int) -> None:
    engine, other = speeds(cores, engines, others)
    expected = fair_speeds(cores, [ENGINE_WEIGHT] * engines + [1.0] * others)
    assert [engine] * engines + [other] * others == pytest.approx(expected)


def test_with_a_core_each_works_take_their_own_time() -> None:
    works = [(0.0, 3.0, True), (1.0, 1.0, True), (1.5, 4.0, False)]
    assert run_machine(3, works) == pytest.approx([3.0, 2.0, 5.5])
    assert run_machine(1, works[:2]) == pytest.approx([4.0, 3.0])


def test_engines_wait_while_others_compute() -> None:
    first, second = run_machine(1, [(0.0, 1.0, True), (0.0, 1.0, False)])
    assert (first, second) == pytest.approx((2.0, 1 + ENGINE_WEIGHT))


def test_a_process_does_one_thing_at_a_time_in_order() -> None:
    machine, done = SharedCores(cores=4), list[tuple[str, float]]()
    now = 0.0

    def begin(seconds: float, action: Any) -> None:
        machine.begin(now, seconds, action)

    process = Process(begin)

    def note(name: str) -> None:
        done.append((name, now))
        if name == "first":  # what an action submits comes after what waits
            process.submit(1.0, partial(note, "last"))

    process.submit(0.0, partial(note, "at once"))
    process.submit(2.0, partial(note, "first"))
    process.submit(0.0, partial(note, "second"))
    process.submit(3.0, partial(note, "third"))
    while machine.next_end < math.inf:
        now = machine.next_end
        machine.pop()()
    names = ["at once", "first", "second", "third", "last"]
    assert done == list(zip(names, [0.0, 2.0, 2.0, 5.0, 6.0], strict=True))


def test_a_busy_process_does_not_wake_up() -> None:
    machine, ends = SharedCores(cores=1), list[float]()
    now = 0.0

    def begin(seconds: float, action: Any) -> None:
        machine.begin(now, seconds, action)

    def end() -> None:
        ends.append(now)

    process = Process(begin, wakeup_s=0.5)
    process.submit(1.0, end)
    process.submit(2.0, end)
    while machine.next_end < math.inf:
        now = machine.next_end
        machine.pop()()
        if len(ends) == 2:
            process.submit(1.0, end)
    assert ends == [1.5, 3.5, 5.0]


@pytest.mark.parametrize(
    "wrong", [{"request_s": -1.0}, {"token_s": math.nan}, {"prompt_token_s": math.inf}]
)
def test_costs_are_bounded(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        ProcessCosts(**wrong)


def test_cores_are_bounded() -> None:
    with pytest.raises(ConfigError):
        MachineConfig(cores=0)
