"""Quantized linear layers with PyTorch's integer GEMMs.

`torch._int_mm` (oneDNN, cuBLASLt) accumulates in int32, where the order does not matter, so it is
batch-invariant. `torch._weight_int8pack_mm` requires scales in the dtype of x. It is used in half
precision only: in float32, its error with K = 4,100 was 1.9 times the bound. The 4-bit GEMM
(`_weight_int4pack_mm`) has a different weight layout on each device, and `scaled_mm` is for float8:
neither supports these weights.
"""

# pyright: basic
from __future__ import annotations

import torch
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten
from ingot.kernels.aten.activation import apply_activation
from ingot.ops.gradient import differentiate
from ingot.ops.quantized import quantize_rows


def _add_epilogue(
    y: Tensor, bias: Tensor | None, activation: int, residual: Tensor | None
) -> Tensor:
    y = apply_activation(y if bias is None else y + bias, activation)
    return y if residual is None else residual + y


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
    return _add_epilogue(y, bias, activation, residual).contiguous()


def _supports_int_mm(x: Tensor, weight: Tensor, *_: object) -> bool:
    """Return whether `_int_mm` takes the call.

    cuBLASLt needs more than 16 rows, and sizes that are multiples of 8.
    """
    if x.dtype == torch.float64 or x.numel() == 0 or weight.numel() == 0:
        return False
    rows = x.numel() // x.shape[-1]
    even = weight.shape[0] % 8 == 0 and weight.shape[1] % 8 == 0
    return x.device.type == "cpu" or (rows > 16 and even)


@aten(ops.linear_int8_dynamic, batch_invariant=True, supports=_supports_int_mm)
def linear_int8_dynamic(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
) -> Tensor:
    """Quantize x, run a GEMM of integers, and apply scales and epilogue in float32."""
    q, x_scale = quantize_rows(x.reshape(-1, x.shape[-1]))
    y = torch.ops.aten._int_mm(q.contiguous(), weight.T) * x_scale[:, None] * scale.float()
    bias = None if bias is None else bias.float()
    if residual is not None:
        residual = residual.float().reshape(y.shape)
    y = _add_epilogue(y, bias, activation, residual)
    return y.to(x.dtype).view(*x.shape[:-1], len(weight))
