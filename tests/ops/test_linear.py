from __future__ import annotations

import pytest
import torch

from ingot import ops

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
