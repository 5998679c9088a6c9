from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ingot import ops
from ingot.core.errors import OpError
from ingot.ops import ActivationFn

RANDOM = torch.Generator().manual_seed(0)
X, W, B = (torch.randn(*shape, generator=RANDOM) for shape in ((5, 16), (8, 16), (8,)))


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        (ActivationFn.IDENTITY, lambda y: y),
        (ActivationFn.GELU, ops.gelu),
        (ActivationFn.GELU_TANH, ops.gelu_tanh),
        (ActivationFn.SILU, ops.silu),
        (ActivationFn.RELU, torch.relu),
    ],
)
def test_epilogue_applies_activation_then_residual(
    activation: ActivationFn, function: Callable[[Tensor], Tensor]
) -> None:
    expected = function(torch.nn.functional.linear(X, W, B))
    torch.testing.assert_close(ops.linear(X, W, B, activation), expected)
    residual = torch.ones(5, 8)
    fused = ops.linear(X, W, B, activation, residual)
    torch.testing.assert_close(fused, expected + 1)
    up = W.flip(0)
    gated = function(X @ W.T) * (X @ up.T)
    torch.testing.assert_close(ops.gated_linear(X, W, up, activation), gated)


def test_gated_linear_is_swiglu_by_default() -> None:
    up = W.flip(0)
    torch.testing.assert_close(ops.gated_linear(X, W, up), ops.swiglu(X @ W.T, X @ up.T))


@pytest.mark.parametrize("activation", [-1, 5])
def test_unknown_activations_are_rejected(activation: int) -> None:
    with pytest.raises(OpError, match="activation must be an ActivationFn"):
        ops.linear(X, W, B, activation)
    with pytest.raises(OpError, match="activation must be an ActivationFn"):
        ops.gated_linear(X, W, W, activation)


def test_the_written_backward_skips_what_is_not_needed() -> None:
    w = W.clone().requires_grad_()
    ops.linear(X, w, B).sum().backward()
    torch.testing.assert_close(w.grad, X.sum(0).expand(8, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_has_the_bits_of_linear(dtype: torch.dtype) -> None:
    x, offsets = torch.randn(70, 33).to(dtype), torch.tensor([0, 0, 1, 40, 40, 70])
    gate, up = torch.randn(2, 5, 19, 33).to(dtype)
    product = ops.grouped_linear(x, gate, offsets)
    gated = ops.grouped_gated_linear(x, gate, up, offsets)
    for e, (a, b) in enumerate(pairwise(offsets.tolist())):
        if ops.linear.select(x, gate[0]).batch_invariant:
            assert torch.equal(product[a:b], ops.linear(x[a:b], gate[e]))
            assert torch.equal(gated[a:b], ops.gated_linear(x[a:b], gate[e], up[e]))
        torch.testing.assert_close(product[a:b], x[a:b] @ gate[e].T)


@pytest.mark.parametrize("offsets", [[0, 2, 4], [1, 2, 5], [0, 6, 5], [0, -1, 5], [0, 5]])
def test_offsets_that_leave_rows_out_are_refused(offsets: list[int]) -> None:
    with pytest.raises(OpError, match="grouped"):
        ops.grouped_linear(X, torch.randn(2, 8, 16), torch.tensor(offsets))
