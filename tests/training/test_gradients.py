"""Sums of gradients: their order is that of the shards, on any number of ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.parallel.ranks import tree_sum
from ingot.training.gradients import GradientSum, default_shards


def leaves(count: int) -> list[torch.Tensor]:
    """Numbers whose sum depends on the order of almost every addition."""
    random = torch.Generator().manual_seed(count)
    return list(torch.randn(count, 64, generator=random) * torch.logspace(-3, 3, 64))


def summed(parts: list[torch.Tensor], shard: int = 1) -> torch.Tensor:
    grads = GradientSum()
    for index, part in enumerate(parts):
        grads.add("w", part.clone())
        if index % shard == shard - 1:
            grads.end_shard()
    return grads.total()["w"]


@given(st.integers(0, 4), st.integers(1, 5), st.integers(0, 4))
def test_ranks_that_sum_subtrees_get_the_same_bits(levels: int, times: int, below: int) -> None:
    """w ranks compute w leaves at a time and sum them pairwise; the rest is summed over time."""
    world_size = 2 ** min(below, levels)
    parts = leaves(2**levels * times)
    at_once = [
        tree_sum(parts[first : first + world_size]) for first in range(0, len(parts), world_size)
    ]
    assert torch.equal(summed(at_once), summed(parts))


def test_the_order_matters() -> None:
    parts = leaves(8)
    assert not torch.equal(summed(parts), summed(parts, shard=8))
    assert not torch.equal(summed(parts), summed([*parts[1:], parts[0]]))


def test_a_shard_is_summed_one_after_another() -> None:
    a, b, c, d, e, f = leaves(6)
    assert torch.equal(summed([a, b, c, d, e, f], shard=3), ((a + b) + c) + ((d + e) + f))


def test_one_gradient_keeps_its_dtype_and_sums_are_in_float32() -> None:
    one = torch.tensor([256.0], dtype=torch.bfloat16)
    assert summed([one]).dtype == torch.bfloat16
    assert summed([one, torch.ones_like(one)]).tolist() == [257.0]
    assert summed([one, torch.ones_like(one)]).dtype == torch.float32


def test_names_that_only_some_shards_have() -> None:
    grads = GradientSum()
    for name in ("a", "b", "a"):
        grads.add(name, torch.ones(1))
        grads.end_shard()
    assert grads.total() == {"a": torch.tensor([2.0]), "b": torch.tensor([1.0])}
    assert grads.total() == {}


def test_cleared_gradients_are_gone() -> None:
    grads = GradientSum()
    grads.add("a", torch.ones(1))
    grads.end_shard()
    grads.add("a", torch.ones(1))
    grads.clear()
    assert grads.total() == {}


@given(st.integers(1, 10**6))
def test_the_default_divides_the_micro_batches(count: int) -> None:
    shards = default_shards(count)
    assert count % shards == 0
    assert shards in (1, 2, 4, 8)
    assert shards == 8 or (count // shards) % 2
