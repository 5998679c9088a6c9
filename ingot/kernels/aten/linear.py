"""`linear` by `torch.nn.functional`: a GEMM of oneDNN or MKL, then the epilogue on its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten


def linear_backward(
    needs: list[bool], grads: list[Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> list[Tensor | None]:
    """Written out, for autograd would run the forward's GEMM once more."""
    (grad,) = grads
    rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
    return [
        grad @ weight if needs[0] else None,
        grad_rows.T @ rows if needs[1] else None,
        grad_rows.sum(0) if needs[2] else None,
    ]


@aten(ops.linear, backward=linear_backward)
def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """One GEMM."""
    return F.linear(x, weight, bias)


@aten(ops.linear_gelu)
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A GEMM and an activation."""
    return F.gelu(F.linear(x, weight, bias))


@aten(ops.linear_gelu_tanh)
def linear_gelu_tanh(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A GEMM and an activation."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")


@aten(ops.linear_silu)
def linear_silu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A GEMM and an activation."""
    return F.silu(F.linear(x, weight, bias))


@aten(ops.linear_relu)
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A GEMM and an activation."""
    return torch.relu(F.linear(x, weight, bias))


@aten(ops.linear_swiglu)
def linear_swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """Two GEMMs, an activation and a product."""
    return F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight)


@aten(ops.linear_residual)
def linear_residual(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None) -> Tensor:
    """A GEMM and a sum."""
    return (residual + F.linear(x, weight, bias)).contiguous()
