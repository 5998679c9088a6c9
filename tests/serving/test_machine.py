from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError
from ingot.serving.machine import MachineConfig, Process, ProcessCosts, SharedCores

Works = list[tuple[float, float]]
"""When each begins, and its seconds."""


def run_machine(cores: int, works: Works) -> list[float]:
    """When each work ends."""
    machine, ends = SharedCores(cores), [math.nan] * len(works)
    upcoming = sorted(range(len(works)), key=lambda n: works[n][0])
    while upcoming or machine.next_end < math.inf:
        if upcoming and works[upcoming[0]][0] <= machine.next_end:
            number = upcoming.pop(0)
            begin, seconds = works[number]
            machine.begin(begin, seconds, partial(ends.__setitem__, number))  # pyright: ignore
        else:
            now = machine.next_end
            machine.pop()(now)  # pyright: ignore
    return ends


def share_in_slices(cores: int, works: Works, slice_s: float) -> list[float]:
    """The same, with the remaining seconds of each work instead of a virtual time."""
    left, ends = [seconds for _, seconds in works], [math.nan] * len(works)
    now = 0.0
    while any(map(math.isnan, ends)):
        active = [n for n, (begin, _) in enumerate(works) if begin <= now and math.isnan(ends[n])]
        speed = min(1.0, cores / max(len(active), 1))
        now += slice_s
        for n in active:
            left[n] -= slice_s * speed
            if left[n] <= 1e-9:
                ends[n] = now
    return ends


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=8),
)
def test_works_share_the_cores(cores: int, works: list[tuple[int, int]]) -> None:
    slice_s = 1 / 64
    scaled = [(begin / 8, seconds / 8) for begin, seconds in works]
    ends = run_machine(cores, scaled)
    for end, expected in zip(ends, share_in_slices(cores, scaled, slice_s), strict=True):
        assert abs(end - expected) <= slice_s * (len(works) + 1)
    # No core is idle while a work waits for one, and none does two things at a time.
    first, seconds = min(scaled)[0], [seconds for _, seconds in scaled]
    assert max(ends) >= first + sum(seconds) / cores - 1e-9
    for end, (begin, alone) in zip(ends, scaled, strict=True):
        assert end >= begin + alone - 1e-9


def test_with_a_core_each_works_take_their_own_time() -> None:
    works = [(0.0, 3.0), (1.0, 1.0), (1.5, 4.0)]
    assert run_machine(3, works) == pytest.approx([3.0, 2.0, 5.5])
    assert run_machine(1, works[:2]) == pytest.approx([4.0, 3.0])


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
