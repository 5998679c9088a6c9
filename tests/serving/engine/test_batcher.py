"""Dynamic batching by hypothesis: when a batch is closed, and what is in it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.core.errors import ConfigError, IngotError
from ingot.serving.engine.batcher import Batcher, BatchingConfig

CONFIG = BatchingConfig(max_batch_size=8, max_queue_delay=0.005)
ARRIVALS = st.lists(
    st.tuples(
        st.integers(1, 8),  # rows
        st.floats(0, 0.02),  # seconds after the last one
        st.one_of(st.none(), st.floats(0, 0.02)),  # seconds until the deadline
    ),
    min_size=1,
    max_size=30,
)


def check(batcher: Batcher, arrivals: Any, batch_s: float) -> None:
    """Run a server that takes `batch_s` for a batch, and check each of its decisions."""
    config, now, arrived = batcher.config, 0.0, 0.0
    times = [arrived := arrived + gap for _, gap, _ in arrivals]
    rows = [rows for rows, _, _ in arrivals]
    ends = [
        math.inf if left is None else time + left
        for time, (_, _, left) in zip(times, arrivals, strict=True)
    ]
    pending, waiting = list(range(len(arrivals))), dict[int, float]()
    while pending or waiting:
        while pending and times[pending[0]] <= now:
            id = pending.pop(0)
            batcher.add(id, rows=rows[id], now=now, deadline=ends[id])
            waiting[id] = now
        due = batcher.due_at(batch_s)
        limits = [
            min(t + config.max_queue_delay, (t + ends[id]) / 2, ends[id] - batch_s)
            for id, t in waiting.items()
        ]
        limit = min(limits, default=math.inf)
        full = sum(rows[id] for id in waiting) >= config.max_batch_size
        if due > now:
            assert not full, "a full batch waits"
            assert due <= limit, "a batch waits too long"
            now = min(due, times[pending[0]] if pending else math.inf)
            continue
        assert full or now >= limit, "a batch is closed early"
        taken = batcher.take()
        order = sorted(waiting, key=lambda id: (ends[id], waiting[id]))
        assert taken, "nothing is computed"
        assert taken == order[: len(taken)], "another order"
        size = sum(rows[id] for id in taken)
        assert size <= config.max_batch_size, "more than a batch"
        rest = order[len(taken) :]
        assert not rest or size + rows[rest[0]] > config.max_batch_size, "one more would fit"
        for id in taken:
            del waiting[id]
        now += batch_s
    assert not len(batcher)


@given(ARRIVALS, st.sampled_from((0.0, 0.001, 0.004)))
@settings(max_examples=150, deadline=None)
def test_batches_are_full_or_due(arrivals: Any, batch_s: float) -> None:
    check(Batcher(CONFIG), arrivals, batch_s)


class Late(Batcher):
    """Does not look at deadlines."""

    def due_at(self, batch_s: float) -> float:
        waits = [one.arrival + self.config.max_queue_delay for one in self._waiting.values()]
        return min(waits, default=math.inf)


class Early(Batcher):
    """Never waits."""

    def due_at(self, batch_s: float) -> float:
        return -math.inf if len(self) else math.inf


class Overfull(Batcher):
    """Takes everything."""

    def take(self) -> list[int]:
        ids = list(self._waiting)
        for id in ids:
            self.remove(id)
        return ids


class Timid(Batcher):
    """Takes one request at a time."""

    def take(self) -> list[int]:
        id = min(self._waiting)
        self.remove(id)
        return [id]


@pytest.mark.parametrize("faulty", [Late, Early, Overfull, Timid])
def test_planted_faults_are_found(faulty: type[Batcher]) -> None:
    arrivals = [
        (3, 0.001, 0.004),
        (4, 0.0005, None),
        (5, 0.02, None),
        (5, 0.0, 0.02),
        (1, 0.1, None),
    ]
    check(Batcher(CONFIG), arrivals, 0.001)
    with pytest.raises(AssertionError):
        check(faulty(CONFIG), arrivals, 0.001)


def test_deadlines_order_requests_and_large_ones_are_not_passed() -> None:
    batcher = Batcher(CONFIG)
    batcher.add(1, rows=2, now=0.0, deadline=9.0)
    batcher.add(2, rows=3, now=0.1, deadline=1.0)
    batcher.add(3, rows=4, now=0.2)
    batcher.add(4, rows=1, now=0.3)
    assert batcher.due_at(0.0) == -math.inf
    assert batcher.take() == [2, 1]
    assert batcher.take() == [3, 4]
    assert batcher.take() == []
    assert batcher.due_at(0.0) == math.inf


def test_removed_requests_leave_no_rows() -> None:
    batcher = Batcher(CONFIG)
    for id in range(8):
        batcher.add(id, rows=1, now=0.0)
    assert batcher.due_at(0.0) == -math.inf
    assert batcher.remove(3)
    assert not batcher.remove(3)
    assert 3 not in batcher
    assert batcher.due_at(0.0) == 0.005
    assert batcher.take() == [0, 1, 2, 4, 5, 6, 7]


def test_bounds() -> None:
    for rows in (0, -1, 9):
        with pytest.raises(IngotError, match="1 to 8 rows"):
            Batcher(CONFIG).add(1, rows=rows, now=0.0)
    for fields in ({"max_batch_size": 0}, {"max_queue_delay": -1.0}, {"max_queue_delay": 11.0}):
        with pytest.raises(ConfigError):
            BatchingConfig(**fields)  # pyright: ignore[reportArgumentType]
