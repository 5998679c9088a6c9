"""Quantized linear layers with PyTorch's integer GEMMs.

`torch._int_mm` (oneDNN, cuBLASLt) accumulates in int32, where the order does not matter, so it is
batch-invariant. ATen's gelu and silu are not: the last elements of a tensor are computed in scalar
code. After `_int_mm`, these activations are computed by a batch-invariant provider.

`torch._weight_int8pack_mm` requires scales in the dtype of x. It is used in half precision only: in
float32, its error with K = 4,100 was 1.9 times the bound. The 4-bit GEMM (`_weight_int4pack_mm`)
has a different weight layout on each device, and `scaled_mm` is for float8: neither supports these
weights.
"""

# pyright: basic
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten
from ingot.kernels.aten.activation import apply_activation
from ingot.ops.codec import quantize_rows
from ingot.ops.dispatch import saved_contexts
from ingot.ops.epilogue import ActivationFn
from ingot.ops.gradient import differentiate, straight_through
from ingot.ops.record import Op

_ACTIVATION_OPS: dict[int, Op[..., Any]] = {
    ActivationFn.GELU: ops.gelu,
    ActivationFn.GELU_TANH: ops.gelu_tanh,
    ActivationFn.SILU: ops.silu,
}


def _supports_pack(x: Tensor, weight: Tensor, scale: Tensor, *_: object) -> bool:
    return x.device.type == "cpu" and scale.dtype == x.dtype and x.itemsize == 2


# PyTorch has no derivative of `_weight_int8pack_mm`.
@aten(ops.linear_int8, supports=_supports_pack, backward=differentiate(ops.linear_int8.fallback))
def linear_int8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
) -> Tensor:
    """Run a GEMM that widens the weight as it reads it, then the epilogue."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = torch.ops.aten._weight_int8pack_mm(rows, weight.contiguous(), scale.contiguous())
    y = y.view(*x.shape[:-1], len(weight))
    y = apply_activation(y if bias is None else y + bias, activation)
    return (y if residual is None else residual + y).contiguous()


def _supports_int_mm(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
    x_group: int,
    gated: bool,
    lora_h: Tensor | None,
    *tail: Any,
) -> bool:
    """Return whether `_int_mm` supports the call, and the activation is batch-invariant.

    cuBLASLt needs more than 16 rows, and sizes that are multiples of 8.
    """
    if x.dtype == torch.float64 or x.numel() == 0 or weight.numel() == 0 or weight.dim() != 2:
        return False
    to_float32 = tail[-1]
    if x_group or gated or to_float32 or lora_h is not None or scale.dim() != 1:
        return False
    rows = x.numel() // x.shape[-1]
    even = weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0
    if x.device.type != "cpu" and not (rows > 16 and even):
        return False
    if activation not in _ACTIVATION_OPS:
        return True
    with saved_contexts(None, batch_invariant=True):
        y = x.new_empty(1, dtype=torch.float32)
        return _ACTIVATION_OPS[activation].select(y).batch_invariant


def _apply_invariant_activation(y: Tensor, activation: int) -> Tensor:
    if activation not in _ACTIVATION_OPS:
        return apply_activation(y, activation)
    with saved_contexts(None, batch_invariant=True):
        return _ACTIVATION_OPS[activation](y)


@aten(
    ops.linear_int8_dynamic,
    batch_invariant=True,
    supports=_supports_int_mm,
    backward=straight_through(ops.linear_int8_dynamic.fallback),
)
def linear_int8_dynamic(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
    *_: object,
) -> Tensor:
    """Quantize x, run a GEMM of integers, and apply scales and epilogue in float32."""
    q, x_scale = quantize_rows(x.reshape(-1, x.shape[-1]))
    y = torch.ops.aten._int_mm(q.contiguous(), weight.T) * x_scale[:, None] * scale.float()
    if bias is not None:
        y = y + bias.float()
    y = _apply_invariant_activation(y, activation)
    if residual is not None:
        y = residual.float().reshape(y.shape) + y
    return y.to(x.dtype).view(*x.shape[:-1], len(weight))
