"""Pooling: the right tokens, in an order that the rest of the batch does not change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from ingot.nn import BatchLayout
from ingot.nn.pooling import Pooling, normalize, pool

LENGTHS = [1, 5, 64, 333, 2, 128, 17]
Pool = Callable[[Tensor, BatchLayout], Tensor]


def hidden_states(dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dim)
    return [torch.randn(n, dim, generator=generator).to(dtype) for n in LENGTHS]


def num_batch_dependent(pooled: Pool, sequences: list[Tensor]) -> int:
    """Count the sequences whose vector has other bits in a batch than alone."""
    layout = BatchLayout.packed([len(x) for x in sequences])
    batch = pooled(torch.cat(sequences), layout)
    alone = [pooled(x, BatchLayout.packed([len(x)]))[0] for x in sequences]
    return sum(not torch.equal(a, b) for a, b in zip(alone, batch, strict=True))


@pytest.mark.parametrize("dim", [384, 97, 1])
def test_pooled_vectors_are_those_of_each_sequence(dim: int) -> None:
    sequences = hidden_states(dim)
    layout, x = BatchLayout.packed(LENGTHS), torch.cat(sequences)
    assert torch.equal(pool(x, layout, Pooling.CLS), torch.stack([x[0] for x in sequences]))
    assert torch.equal(pool(x, layout, Pooling.LAST), torch.stack([x[-1] for x in sequences]))
    means = torch.stack([x.double().mean(0) for x in sequences])
    assert (pool(x, layout, Pooling.MEAN) - means).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pooling", Pooling)
def test_pooling_is_batch_invariant(pooling: Pooling, dtype: torch.dtype) -> None:
    sequences = hidden_states(96, dtype)

    def pooled(x: Tensor, layout: BatchLayout) -> Tensor:
        return normalize(pool(x, layout, pooling))

    assert num_batch_dependent(pooled, sequences) == 0
    assert num_batch_dependent(pooled, sequences[::-1]) == 0


def test_means_do_not_depend_on_the_number_of_threads() -> None:
    x, layout = torch.cat(hidden_states(384)), BatchLayout.packed(LENGTHS)
    one, before = pool(x, layout, Pooling.MEAN), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(pool(x, layout, Pooling.MEAN), one)
    finally:
        torch.set_num_threads(before)


def test_a_mean_by_matmul_would_be_found() -> None:
    """A planted fault: one matmul with a mask is a mean, too, but its bits are the batch's."""

    def by_matmul(x: Tensor, layout: BatchLayout) -> Tensor:
        lengths = layout.cu_seqlens.diff()
        rows = torch.arange(len(lengths)).repeat_interleave(lengths)
        weights = torch.nn.functional.one_hot(rows, len(lengths)).T / lengths[:, None]
        return weights @ x

    sequences = hidden_states(96)
    layout, x = BatchLayout.packed(LENGTHS), torch.cat(sequences)
    torch.testing.assert_close(by_matmul(x, layout), pool(x, layout, Pooling.MEAN))
    assert num_batch_dependent(by_matmul, sequences) > 0
    assert num_batch_dependent(partial(pool, pooling=Pooling.MEAN), sequences) == 0


def test_gradients_are_those_of_the_mean() -> None:
    x = torch.cat(hidden_states(8)).requires_grad_()
    pool(x, BatchLayout.packed(LENGTHS), Pooling.MEAN).sum().backward()
    expected = torch.cat([torch.full((n, 8), 1 / n) for n in LENGTHS])
    assert x.grad is not None
    torch.testing.assert_close(x.grad, expected)
