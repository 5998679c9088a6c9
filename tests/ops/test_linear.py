"""Tests of linear layers, gated and grouped."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ingot import ops
from ingot.core.errors import OpError

RANDOM = torch.Generator().manual_seed(0)
X, W, B = (torch.randn(*shape, generator=RANDOM) for shape in ((5, 16), (8, 16), (8,)))


def test_gated_linear_is_swiglu_by_default() -> None:
    up = W.flip(0)
    torch.testing.assert_close(ops.gated_linear(X, W, up), ops.swiglu(X @ W.T, X @ up.T))


def test_backward_without_grad_of_x_and_bias() -> None:
    w = W.clone().requires_grad_()
    ops.linear(X, w, B).sum().backward()
    torch.testing.assert_close(w.grad, X.sum(0).expand(8, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_are_bitwise_equal_to_linear(dtype: torch.dtype) -> None:
    x, offsets = torch.randn(70, 33).to(dtype), torch.tensor([0, 0, 1, 40, 40, 70])
    gate, up = torch.randn(2, 5, 19, 33).to(dtype)
    y = ops.grouped_linear(x, gate, offsets)
    gated = ops.grouped_gated_linear(x, gate, up, offsets)
    for e, (a, b) in enumerate(pairwise(offsets.tolist())):
        if ops.linear.select(x, gate[0]).batch_invariant:
            assert torch.equal(y[a:b], ops.linear(x[a:b], gate[e]))
            assert torch.equal(gated[a:b], ops.gated_linear(x[a:b], gate[e], up[e]))
        torch.testing.assert_close(y[a:b], x[a:b] @ gate[e].T)


@pytest.mark.parametrize("offsets", [[0, 2, 4], [1, 2, 5], [0, 6, 5], [0, -1, 5], [0, 5]])
def test_offsets_that_do_not_cover_all_rows_raise(offsets: list[int]) -> None:
    with pytest.raises(OpError, match="grouped"):
        ops.grouped_linear(X, torch.randn(2, 8, 16), torch.tensor(offsets))
