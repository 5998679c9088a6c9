"""Attention is batch-invariant: a token's result is bitwise equal to that of its whole sequence
computed alone, as in training.

A schedule is what a serving engine does to a batch of sequences: it prefills them in chunks and
decodes them token by token, each step in a different batch, with keys and values packed or in
blocks anywhere in a KV cache. The rest of the cache is NaN, so that a kernel that reads it fails.

A cache may be in int8. Whole sequences then have keys and values that are rounded to the same
values, in their own dtype: they are computed by the kernel without int8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from ingot import ops
from ingot.core.device import detect
from ingot.ops.codec import quantize_kv, round_kv
from ingot.ops.inputs import TensorMaker

KIND = "schedules"
BITS = {2: torch.int16, 4: torch.int32}

pytestmark = [
    pytest.mark.skipif(
        "cpu" not in ops.attention.providers, reason="attention has no CPU kernel yet"
    ),
    pytest.mark.skipif(detect().compiler is None, reason="no C++ compiler"),
]


@dataclass(frozen=True)
class Schedule:
    """A batch of sequences and the way it is served."""

    dtype: torch.dtype
    seed: int
    lengths: tuple[int, ...]
    kv_heads: int
    group: int
    width: int
    causal: bool
    window: int | None
    scale: float | None
    page: int | None
    """Slots of a page; None where keys and values are packed."""
    int8: bool
    """Whether pages are in int8."""
    longest_chunk: int
    busy: float
    """How likely a sequence takes part in a step."""
    index_dtype: torch.dtype
    threads: tuple[int, int]
    """For the whole sequences, and for the steps."""


_lengths = st.one_of(st.integers(1, 12), st.integers(1, 80), st.integers(1, 300))
schedules = st.builds(
    Schedule,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(_lengths, min_size=1, max_size=5).map(tuple),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 4, 7]),
    width=st.one_of(st.sampled_from([8, 16, 32, 64, 128]), st.integers(1, 130)),
    causal=st.sampled_from([True, True, True, False]),
    window=st.one_of(st.none(), st.none(), st.integers(1, 40), st.integers(1, 300)),
    scale=st.sampled_from([None, None, 0.5]),
    page=st.one_of(st.none(), st.integers(1, 64), st.sampled_from([1, 8, 16, 32, 64])),
    int8=st.booleans(),
    longest_chunk=st.sampled_from([1, 3, 17, 64, 300]),
    busy=st.sampled_from([0.3, 0.7, 1.0]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    threads=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)


@dataclass(frozen=True)
class Chunk:
    """Tokens `start` to `end` of sequence `index`, which look at its first `keys` keys."""

    index: int
    start: int
    end: int
    keys: int


class Engine:
    """Computes a schedule's steps and holds the sequences they are about."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.random = torch.Generator().manual_seed(schedule.seed)
        self.make = TensorMaker(schedule.dtype, seed=schedule.seed)
        heads = schedule.kv_heads * schedule.group, schedule.kv_heads, schedule.kv_heads
        self.sequences = [
            tuple(self.make.spread(n, h, schedule.width, low=-6, high=2) for h in heads)
            for n in schedule.lengths
        ]
        self.int8 = schedule.int8 and schedule.page is not None

    def below(self, high: int) -> int:
        return int(torch.randint(high, (), generator=self.random))

    def ints(self, values: Any) -> Tensor:
        return torch.tensor(values, dtype=self.schedule.index_dtype)

    def call(self, q: Tensor, k: Tensor, v: Tensor, *where: Tensor | None) -> Tensor:
        s = self.schedule
        args: list[Any] = [q, k, v, *where, s.causal, s.window, s.scale]
        assert ops.attention.select(*args).name == "cpu"
        return ops.attention(*args)

    def rounded(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """A sequence with the keys and values that the cache has."""
        q, k, v = self.sequences[index]
        return (q, round_kv(k), round_kv(v)) if self.int8 else (q, k, v)

    def whole(self, index: int) -> Tensor:
        """The oracle: a sequence alone, as in training."""
        q, k, v = self.rounded(index)
        return self.call(q, k, v, self.ints([0, len(q)]), None, None)

    def packed(self) -> list[Tensor]:
        """All sequences in one call, as in training."""
        sequences = [self.rounded(index) for index in range(len(self.sequences))]
        q, k, v = (torch.cat(parts) for parts in zip(*sequences, strict=True))
        result = self.call(q, k, v, self._running(self.schedule.lengths), None, None)
        return list(result.split(self.schedule.lengths))

    def steps(self) -> Iterator[list[Chunk]]:
        """Chunks that are computed together, until every token has been."""
        done = [0] * len(self.sequences)
        while any(a < n for a, n in zip(done, self.schedule.lengths, strict=True)):
            chosen = [self._next(i, done[i]) for i in range(len(done)) if self._takes_part(i, done)]
            if not chosen:
                continue
            order = torch.randperm(len(chosen), generator=self.random).tolist()
            yield [chosen[i] for i in order]
            for chunk in chosen:
                done[chunk.index] = chunk.end

    def step(self, chunks: list[Chunk]) -> list[Tensor]:
        q = torch.cat([self.sequences[c.index][0][c.start : c.end] for c in chunks])
        counts = [c.end - c.start for c in chunks]
        k, v = ([self.sequences[c.index][which][: c.keys] for c in chunks] for which in (1, 2))
        where = self._running(counts), self.ints([c.keys for c in chunks])
        page = self.schedule.page
        if page is None:
            return list(self.call(q, torch.cat(k), torch.cat(v), *where, None).split(counts))
        table, pages = self._pages([c.keys for c in chunks], page)
        pools = (self._pool(parts, table, pages, page) for parts in (k, v))
        return list(self.call(q, *pools, *where, self.ints(table)).split(counts))

    def _takes_part(self, index: int, done: list[int]) -> bool:
        luck = float(torch.rand((), generator=self.random)) < self.schedule.busy
        return luck and done[index] < self.schedule.lengths[index]

    def _next(self, index: int, start: int) -> Chunk:
        total = self.schedule.lengths[index]
        if not self.schedule.causal:  # every token needs all keys, so any last part is a chunk
            return Chunk(index, self.below(total), total, total)
        # A prompt in chunks of any length, then more and more single tokens.
        length = 1 if self.below(2) else 1 + self.below(self.schedule.longest_chunk)
        end = min(total, start + length)
        return Chunk(index, start, end, end)

    def _running(self, counts: Any) -> Tensor:
        return self.ints([0, *torch.tensor(counts).cumsum(0).tolist()])

    def _pages(self, keys: list[int], page: int) -> tuple[list[list[int]], int]:
        """Pages for each sequence, in any order among pages of others; -1 where none is needed."""
        needed = [-(-n // page) for n in keys]
        pages = sum(needed) + self.below(4)
        free = iter(torch.randperm(pages, generator=self.random).tolist())
        longest = max(needed) + self.below(2)
        return [[next(free) for _ in range(n)] + [-1] * (longest - n) for n in needed], pages

    def _pool(self, parts: list[Tensor], table: list[list[int]], pages: int, page: int) -> Tensor:
        pool = torch.full((pages, page, *parts[0].shape[1:]), torch.nan, dtype=parts[0].dtype)
        for part, row in zip(parts, table, strict=True):
            for number, slots in zip(row, part.split(page), strict=False):
                pool[number, : len(slots)] = slots
        return quantize_kv(pool) if self.int8 else pool


def assert_same_bits(actual: Tensor, expected: Tensor, where: object) -> None:
    bits = BITS[actual.element_size()]
    different = (actual.contiguous().view(bits) != expected.contiguous().view(bits)).nonzero()
    assert not len(different), f"{where}: {len(different)} values, {different[:3]}"


def assert_batch_invariant(schedule: Schedule) -> None:
    engine = Engine(schedule)
    torch.set_num_threads(schedule.threads[0])
    oracle = [engine.whole(index) for index in range(len(schedule.lengths))]
    assert all(result.isfinite().all() for result in oracle)
    torch.set_num_threads(schedule.threads[1])
    for index, result in enumerate(engine.packed()):
        assert_same_bits(result, oracle[index], f"sequence {index}, packed")
    for chunks in engine.steps():
        for chunk, result in zip(chunks, engine.step(chunks), strict=True):
            assert_same_bits(result, oracle[chunk.index][chunk.start : chunk.end], chunk)


def test_attention_is_batch_invariant(explore: Any) -> None:
    explore(schedules, assert_batch_invariant, 40)


@pytest.mark.slow
def test_attention_is_batch_invariant_on_many_schedules(explore: Any) -> None:
    explore(schedules, assert_batch_invariant, 1000)


@pytest.mark.parametrize("queries", [1, 6, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_scores_do_not_overflow(dtype: torch.dtype, queries: int) -> None:
    """Rounded once and not at all, a score of 1e11 differs by thousands: e to that is inf, or 0."""
    for seed in range(40):
        random = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(queries, 2, 8, generator=random).to(dtype) for _ in range(3))
        k[seed % queries, :, seed % 8] = 1e11
        cu_seqlens = torch.tensor([0, queries], dtype=torch.int32)
        found = ops.attention(q, k, v, cu_seqlens)
        with ops.prefer("reference"):
            expected = ops.attention(q, k, v, cu_seqlens)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("queries", [1, 5, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_outlier_rounds_its_own_token_and_head_alone(dtype: torch.dtype, queries: int) -> None:
    """A key and a value 1,000 times as large as the others: with a scale per block or per channel
    the rest would become 0."""
    make, keys, starts = TensorMaker(dtype), 80, torch.tensor([0, queries])
    q, k, v = make(queries, 4, 16), make(5, 16, 2, 16), make(5, 16, 2, 16)
    k[1, 3, 0, 5], v[1, 3, 0, 7] = -1000.0, 1000.0
    where = starts, torch.tensor([keys]), torch.tensor([[4, 1, 0, 3, 2]])
    found = ops.attention(q, quantize_kv(k), quantize_kv(v), *where)
    assert_same_bits(found, ops.attention(q, round_kv(k), round_kv(v), *where), "rounded")
    expected = ops.attention(q, k, v, *where)
    other_head = (found - expected)[:, 2:].abs().max()
    assert 0 < other_head < 0.03
    rounded = round_kv(k)
    rest = torch.ones(5, 16, 2, dtype=torch.bool)
    rest[1, 3, 0] = False
    assert (rounded - k)[rest].abs().max() < 0.03
