from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError, DataError
from ingot.data import loader as module
from ingot.data.loader import MAX_SAMPLE, PREFETCH, Loader

SEEDS = st.integers(0, 2**64 - 1)


class Numbers:
    """Dataset that are their own indices; a batch is their list."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Sequence[int]) -> list[int]:
        return list(indices)


def taken(loader: Loader[list[int]], batches: int) -> list[int]:
    return [i for batch in itertools.islice(loader, batches) for i in batch]


@given(count=st.integers(1, 30), batch_size=st.integers(1, 8), seed=SEEDS)
def test_an_epoch_has_every_sample_once(count: int, batch_size: int, seed: int) -> None:
    found = taken(Loader(Numbers(count), batch_size=batch_size, seed=seed), 3 * count)
    for epoch in range(len(found) // count):
        assert sorted(found[epoch * count : (epoch + 1) * count]) == list(range(count))


PIECES = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 3)),
    min_size=1,
    max_size=6,
)


@given(count=st.integers(1, 30), seed=SEEDS, pieces=PIECES)
def test_a_run_in_several_parts_takes_the_same_samples(
    count: int, seed: int, pieces: list[tuple[int, int, int, int]]
) -> None:
    """Each part with its own batch size, ranks and steps, resumed from the last state."""
    state, found = {"sample": 0, "seed": seed}, []
    for batch_size, world_size, consecutive, steps in pieces:
        ranks = [
            Loader(
                Numbers(count),
                batch_size=batch_size,
                seed=state["seed"],
                rank=rank,
                world_size=world_size,
                consecutive=consecutive,
            )
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.seek(state["sample"])
        for _ in range(steps):
            for rank in ranks:
                found += [sample for _ in range(consecutive) for sample in next(rank)]
        states = [rank.state_dict() for rank in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert state["sample"] == len(found)
    assert found == taken(Loader(Numbers(count), batch_size=1, seed=seed), len(found))


def test_the_state_does_not_count_prefetched_batches() -> None:
    loader = Loader(Numbers(100), batch_size=4, seed=3)
    assert loader.state_dict() == {"sample": 0, "seed": 3}
    next(loader)
    assert loader.state_dict() == {"sample": 4, "seed": 3}


@given(seed=SEEDS, places=st.lists(st.integers(0, 10**15), min_size=1, max_size=4))
def test_seeking_discards_prefetched_batches(seed: int, places: list[int]) -> None:
    loader = Loader(Numbers(100), batch_size=4, seed=seed)
    next(loader)
    for place in places:
        loader.seek(place)
        assert next(loader) == loader.batch_at(place)
        assert next(loader) == loader.batch_at(place + 4)


def test_batch_at_does_not_advance_the_loader() -> None:
    loader = Loader(Numbers(100), batch_size=4, seed=3)
    later = loader.batch_at(8)
    assert [next(loader) for _ in range(3)][2] == later


class Watched(Numbers):
    """Says when a batch was made, and by whom."""

    def __init__(self) -> None:
        super().__init__(10)
        self.threads: list[str] = []
        self.enough = threading.Event()

    def batch(self, indices: Sequence[int]) -> list[int]:
        self.threads.append(threading.current_thread().name)
        if len(self.threads) == 1 + PREFETCH:
            self.enough.set()
        return super().batch(indices)


def test_batches_are_made_ahead_and_elsewhere() -> None:
    watched = Watched()
    loader = Loader(watched, batch_size=2)
    next(loader)
    assert watched.enough.wait(60)
    assert all(name.startswith("ingot-data") for name in watched.threads)


def test_an_unreferenced_loader_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    loader = Loader(Numbers(10), batch_size=2)
    next(loader)
    (thread,) = set(threading.enumerate()) - before
    del loader
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_waiting_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    loader = Loader(Numbers(10), batch_size=2)
    for _ in range(3):
        next(loader)
    assert loader.wait_seconds == 3


class Failing(Numbers):
    """The third batch fails, until it is mended."""

    broken = True

    def batch(self, indices: Sequence[int]) -> list[int]:
        found = super().batch(indices)
        if self.broken and found == self.third:
            raise DataError("the shard cannot be read", hint="restore it")
        return found

    third: Sequence[int] = ()


def test_a_read_error_is_raised_in_order_and_the_batch_is_not_skipped() -> None:
    failing = Failing(100)
    loader = Loader(failing, batch_size=5)
    failing.third = loader.batch_at(10)
    next(loader)
    next(loader)
    for _ in range(2):
        with pytest.raises(DataError, match="cannot be read"):
            next(loader)
        assert loader.state_dict()["sample"] == 10
    failing.broken = False
    assert next(loader) == failing.third
    assert loader.state_dict()["sample"] == 15


def test_an_interrupted_wait_loses_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = Loader(Numbers(100), batch_size=5)
    expected = loader.batch_at(0)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(module.Future, "result", lambda self: interrupted())
        with pytest.raises(KeyboardInterrupt):
            next(loader)
    assert next(loader) == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"batch_size": 1, "seed": -1},
        {"batch_size": 1, "seed": 2**64},
        {"batch_size": 1, "rank": 1},
        {"batch_size": 1, "rank": -1},
        {"batch_size": 1, "world_size": 0},
    ],
)
def test_invalid_options_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Loader(Numbers(3), **wrong)


def test_an_empty_dataset_is_rejected() -> None:
    with pytest.raises(ConfigError, match="0 samples"):
        Loader(Numbers(0), batch_size=1)


@pytest.mark.parametrize("sample", [-1, MAX_SAMPLE + 1])
def test_an_invalid_position_is_rejected(sample: int) -> None:
    with pytest.raises(ConfigError, match="sample: must be from 0"):
        Loader(Numbers(3), batch_size=1).seek(sample)
