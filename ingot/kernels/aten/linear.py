"""`linear` by `torch.nn.functional`: a GEMM of oneDNN or MKL, then the epilogue on its own.

Groups are `grouped_mm`. Gradients of them are left to the next provider: on Blackwell, PyTorch's
gradient of the weight of a group without rows is not 0 (pytorch issue 172439, open in 2026-11).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten, on_gpu
from ingot.ops.op import Override


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


def _groups(x: Tensor, weight: Tensor, *_: object) -> bool:
    """bfloat16, with rows that begin at multiples of 16 bytes."""
    sizes = (*weight.shape[1:], *weight.stride()[:2], x.stride(0))
    fits = weight.stride(2) == x.stride(1) == 1 and all(size % 8 == 0 for size in sizes)
    return x.dtype == torch.bfloat16 and x.numel() > 0 and weight.numel() > 0 and fits


def _grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    ends = offsets[1:].to(torch.int32)
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """One GEMM for all groups."""
    return _grouped(x, weight, offsets).contiguous()


def grouped_swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor, offsets: Tensor) -> Tensor:
    """Two GEMMs, an activation and a product."""
    gate = _grouped(x, gate_weight, offsets)
    return (F.silu(gate) * _grouped(x, up_weight, offsets)).contiguous()


def _both(x: Tensor, gate_weight: Tensor, up_weight: Tensor, offsets: Tensor) -> bool:
    return _groups(x, gate_weight) and _groups(x, up_weight)


def _here(x: Tensor, *_: object) -> bool:
    return on_gpu(x)


_PREFERRED = Override(
    when=_here,
    reason="bfloat16, sizes in multiples of 8: `grouped_mm` is CUTLASS's, written for each "
    "generation; gradients are Triton's",
)
ops.grouped_linear.provide(
    "aten", grouped_linear, batch_invariant=False, supports=_groups, preferred_for=_PREFERRED
)
ops.grouped_swiglu.provide(
    "aten", grouped_swiglu, batch_invariant=False, supports=_both, preferred_for=_PREFERRED
)
