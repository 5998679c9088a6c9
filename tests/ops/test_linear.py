from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ingot import ops
from ingot.core.errors import OpError

RANDOM = torch.Generator().manual_seed(0)
X, W, B = (torch.randn(*shape, generator=RANDOM) for shape in ((5, 16), (8, 16), (8,)))


@pytest.mark.parametrize(
    ("fused", "epilogue"),
    [
        (ops.linear_gelu, ops.gelu),
        (ops.linear_gelu_tanh, ops.gelu_tanh),
        (ops.linear_silu, ops.silu),
        (ops.linear_relu, torch.relu),
    ],
)
def test_an_epilogue_is_the_activation_of_the_product(fused: ops.Op, epilogue: ops.Op) -> None:
    torch.testing.assert_close(fused(X, W, B), epilogue(torch.nn.functional.linear(X, W, B)))


def test_swiglu_takes_gate_and_up() -> None:
    up = W.flip(0)
    torch.testing.assert_close(ops.linear_swiglu(X, W, up), ops.swiglu(X @ W.T, X @ up.T))


def test_residual_is_added() -> None:
    residual = torch.ones(5, 8)
    torch.testing.assert_close(ops.linear_residual(X, W, residual, B), X @ W.T + B + 1)


def test_the_written_backward_skips_what_is_not_needed() -> None:
    w = W.clone().requires_grad_()
    ops.linear(X, w, B).sum().backward()
    torch.testing.assert_close(w.grad, X.sum(0).expand(8, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_has_the_bits_of_linear(dtype: torch.dtype) -> None:
    x, offsets = torch.randn(70, 33).to(dtype), torch.tensor([0, 0, 1, 40, 40, 70])
    gate, up = torch.randn(2, 5, 19, 33).to(dtype)
    product = ops.grouped_linear(x, gate, offsets)
    gated = ops.grouped_swiglu(x, gate, up, offsets)
    for e, (a, b) in enumerate(pairwise(offsets.tolist())):
        if ops.linear.select(x, gate[0]).batch_invariant:
            assert torch.equal(product[a:b], ops.linear(x[a:b], gate[e]))
            assert torch.equal(gated[a:b], ops.linear_swiglu(x[a:b], gate[e], up[e]))
        torch.testing.assert_close(product[a:b], x[a:b] @ gate[e].T)


@pytest.mark.parametrize("offsets", [[0, 2, 4], [1, 2, 5], [0, 6, 5], [0, -1, 5], [0, 5]])
def test_offsets_that_leave_rows_out_are_refused(offsets: list[int]) -> None:
    with pytest.raises(OpError, match="grouped"):
        ops.grouped_linear(X, torch.randn(2, 8, 16), torch.tensor(offsets))
