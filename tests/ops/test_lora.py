"""LoRA: the formula of the paper, and rows that depend on their own adapter only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ingot import ops
from ingot.core.errors import OpError

DTYPES = (torch.float32, torch.bfloat16)


def adapters(count: int, rank: int, width: int, out: int, dtype: torch.dtype) -> Any:
    random = torch.Generator().manual_seed(count + rank)
    a = torch.randn(count, rank, width, generator=random) * width**-0.5
    b = torch.randn(count, rank, out, generator=random)
    return a.to(dtype), b.to(dtype), torch.rand(count, generator=random) + 0.5


def test_formula_of_the_paper() -> None:
    """h = W x + (alpha / r) B A x (Hu et al. 2021, section 4.1), with their B transposed."""
    x, weight = torch.randn(5, 12, dtype=torch.float64), torch.randn(7, 12, dtype=torch.float64)
    a, b, scale = (t.double() for t in adapters(1, 3, 12, 7, torch.float32))
    h = ops.lora_shrink(x, a, scale)
    merged = weight + scale * (b[0].T @ a[0])
    torch.testing.assert_close(ops.linear(x, weight, lora_h=h, lora_b=b), x @ merged.T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 32, 600])
def test_zero_b_has_the_bits_of_the_base(dtype: torch.dtype, rows: int) -> None:
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(80, 48).to(dtype)
    a, b, scale = adapters(2, 4, 48, 80, dtype)
    index = torch.randint(-1, 2, (rows,), dtype=torch.int32)
    h = ops.lora_shrink(x, a, scale, index)
    assert torch.equal(
        ops.linear(x, weight, None, 3), ops.linear(x, weight, None, 3, None, h, 0 * b)
    )
    both = torch.cat([h, h], 1)
    gated = ops.gated_linear(x, weight, weight, 3, both, 0 * b, 0 * b, index)
    assert torch.equal(gated, ops.gated_linear(x, weight, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_without_an_adapter_have_the_bits_of_the_base(dtype: torch.dtype) -> None:
    x, weight = torch.randn(40, 48).to(dtype), torch.randn(80, 48).to(dtype)
    a, b, scale = adapters(2, 4, 48, 80, dtype)
    index = torch.randint(-1, 2, (40,), dtype=torch.int32)
    h = ops.lora_shrink(x, a, scale, index)
    assert not h[index < 0].any()
    y = ops.linear(x, weight, None, 0, x.new_ones(40, 80), h, b, index)
    base = ops.linear(x, weight, None, 0, x.new_ones(40, 80))
    same = (y == base).all(1)
    assert torch.equal(same, index < 0)


@settings(deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    count=st.integers(1, 9),
    rank=st.sampled_from([1, 3, 8, 16, 70]),
    rows=st.integers(1, 90),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_row_is_the_same_alone_and_among_other_adapters(
    dtype: torch.dtype, count: int, rank: int, rows: int, seed: int
) -> None:
    torch.manual_seed(seed)
    x, weight = torch.randn(rows, 40).to(dtype), torch.randn(72, 40).to(dtype)
    a, b, scale = adapters(count, rank, 40, 72, dtype)
    index = torch.randint(-1, count, (rows,), dtype=torch.int32)
    mixed = ops.linear(x, weight, None, 0, None, ops.lora_shrink(x, a, scale, index), b, index)
    for row in torch.randperm(rows)[:5].tolist():
        own = slice(int(index[row]), int(index[row]) + 1)
        one = x[row : row + 1]
        if index[row] < 0:
            alone = ops.linear(one, weight)
        else:  # as in training: one adapter, no index
            alone = ops.linear(
                one, weight, lora_h=ops.lora_shrink(one, a[own], scale[own]), lora_b=b[own]
            )
        assert torch.equal(mixed[row], alone[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rank_padded_with_zeros_has_the_same_bits(dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 40).to(dtype), torch.randn(72, 40).to(dtype)
    a, b, scale = adapters(1, 5, 40, 72, dtype)

    def padded(t: Tensor) -> Tensor:
        return torch.cat([t, t.new_zeros(1, 11, t.shape[2])], 1)

    own = ops.linear(x, weight, lora_h=ops.lora_shrink(x, a, scale), lora_b=b)
    h = ops.lora_shrink(x, padded(a), scale)
    assert torch.equal(own, ops.linear(x, weight, lora_h=h, lora_b=padded(b)))


@pytest.mark.parametrize(("channels", "rank"), [(0, 3), (4, 0), (0, 0)])
def test_without_channels_or_ranks_the_term_is_zero(channels: int, rank: int) -> None:
    x, a, scale = torch.ones(5, channels), torch.ones(1, rank, channels), torch.ones(1)
    h = ops.lora_shrink.reference(x, a, scale)
    assert torch.equal(h, torch.zeros(5, rank))
    assert torch.equal(ops.lora_shrink(x, a, scale), h)


def test_frozen_weight_has_no_gradient_and_the_adapter_has() -> None:
    x = torch.randn(6, 16).bfloat16().requires_grad_()
    weight = torch.randn(8, 16).bfloat16()
    a, b, scale = adapters(1, 2, 16, 8, torch.bfloat16)
    for parameter in (a, b):
        parameter.requires_grad_()
    ops.linear(x, weight, lora_h=ops.lora_shrink(x, a, scale), lora_b=b).float().sum().backward()
    assert weight.grad is None
    assert all(t.grad is not None and t.grad.any() for t in (x, a, b))


X, WEIGHT = torch.ones(3, 4), torch.ones(5, 4)
H, B = torch.ones(3, 2), torch.ones(1, 2, 5)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ((H, None, None), "must be given together"),
        ((None, None, torch.zeros(3).int()), "must be given together"),
        ((H, B[0], None), "lora_b must be"),
        ((H[:2], B, None), "lora_b must be"),
        ((H[:, :1], B, None), "lora_b must be"),
        ((H, B[:, :, :4], None), "lora_b must be"),
        ((H.bfloat16(), B, None), "lora_h must be torch.float32"),
        ((H, B, torch.zeros(2).int()), "adapter index must be integers"),
        ((H, B, torch.zeros(3)), "adapter index must be integers"),
        ((H, B[:0], None), "at least one adapter"),
        ((H, B, torch.ones(3).int()), "adapter index out of range"),
    ],
)
def test_wrong_arguments_are_refused(lora: tuple[Any, ...], message: str) -> None:
    with pytest.raises(OpError, match=message):
        ops.linear(X, WEIGHT, None, 0, None, *lora)
