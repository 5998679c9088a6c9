"""Integers for weights and activations: how values of 8 and 4 bits are packed and decoded.

    decode_int8(q, scale)                = scale * q
    decode_int4(q, scale, zero_point)    = scale * (q - zero_point), where None represents 8
    decode_int4(q, scale, minimum)       = scale * q + minimum

A weight is (N, D). Scales, zero points and minima are (N, G) for G groups of channels, or (N,).

The bytes of a weight, (N, B), may also be in panels of 16 rows, (N / 16, B / 4, 16, 4): 4 bytes of
each of 16 rows are adjacent, as the kernels for CPUs read them. So may scales, zero points and
minima of groups: (N / 16, G, 16).

A KV cache in int8 has rows of H + 4 bytes, one for each token and head: H values, then their scale
in float32 (the granularity of vLLM's `int8_per_token_head`). Both are in one tensor, so that a
block of the cache holds all that belongs to its tokens.
"""

# pyright: basic
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.ops.arguments import accum_dtype
from ingot.ops.inputs import TensorMaker

GROUP_SIZES = (32, 64, 128)
"""Numbers of channels that may share a scale."""

INT8_GROUP_SIZES = (16, *GROUP_SIZES)
"""The same for 8 bits: GGUF's Q6_K has 16."""

PANEL_ROWS = 16
"""Rows of a panel."""

KV_SCALE_BYTES = 4
"""Bytes of the scale after the values of a row of an int8 KV cache."""

# Rows of smaller magnitude use this one, so that the scale is a normal number.
_MIN_MAGNITUDE = 2.0**-100


def pack_int4(weight: Tensor) -> Tensor:
    """Pack integers from 0 to 15, (N, D), into bytes, (N, D / 2).

    >>> pack_int4(torch.tensor([[1, 2, 3, 15]]))
    tensor([[ 33, 243]], dtype=torch.uint8)
    """
    return (weight[..., ::2] | weight[..., 1::2] << 4).to(torch.uint8)


def unpack_int4(packed: Tensor) -> Tensor:
    """Unpack bytes, (N, D / 2), into integers from 0 to 15, (N, D).

    >>> unpack_int4(torch.tensor([[33, 243]], dtype=torch.uint8))
    tensor([[ 1,  2,  3, 15]], dtype=torch.uint8)
    """
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def fits_panels(rows: int, row_bytes: int) -> bool:
    """Return whether rows of bytes can be in panels.

    >>> fits_panels(576, 288)
    True
    """
    return rows % PANEL_ROWS == 0 and row_bytes % 4 == 0


def to_panels(rows: Tensor) -> Tensor:
    """Convert rows of bytes, (N, B), or of scales, (N, G), to panels.

    >>> to_panels(torch.zeros(32, 8, dtype=torch.int8)).shape, to_panels(torch.zeros(32, 8)).shape
    (torch.Size([2, 2, 16, 4]), torch.Size([2, 8, 16]))
    """
    is_bytes = not rows.is_floating_point()
    elements = rows.contiguous().view(torch.int32) if is_bytes else rows
    panels = elements.unflatten(0, (-1, PANEL_ROWS)).transpose(1, 2).contiguous()
    return panels.unsqueeze(-1).view(rows.dtype) if is_bytes else panels


def to_rows(panels: Tensor) -> Tensor:
    """Convert panels to rows; rows are returned as they are.

    >>> rows = torch.arange(512, dtype=torch.int16).view(16, 32).to(torch.int8)
    >>> torch.equal(to_rows(to_panels(rows)), rows)
    True
    """
    if panels.dim() < 3:
        return panels
    rows = panels.transpose(1, 2)
    return (rows.flatten(2) if panels.dim() == 4 else rows).flatten(0, 1)


def weight_shape(weight: Tensor) -> tuple[int, int]:
    """Return N and B of a weight in rows or in panels; 0 and 0 for other tensors.

    >>> weight_shape(torch.empty(2, 8, 16, 4))
    (32, 32)
    """
    if weight.dim() == 4 and weight.shape[2:] == (PANEL_ROWS, 4):
        return weight.shape[0] * PANEL_ROWS, weight.shape[1] * 4
    return (weight.shape[0], weight.shape[1]) if weight.dim() == 2 else (0, 0)


def scale_shape(scale: Tensor) -> tuple[int, int]:
    """Return N and G of scales per row, or per row and group, in rows or in panels.

    >>> scale_shape(torch.empty(32)), scale_shape(torch.empty(2, 8, 16))
    ((32, 1), (32, 8))
    """
    if scale.dim() == 3 and scale.shape[2] == PANEL_ROWS:
        return scale.shape[0] * PANEL_ROWS, scale.shape[1]
    if scale.dim() > 2:
        return 0, 0
    return (scale.shape[0], scale.shape[1]) if scale.dim() == 2 else (scale.numel(), 1)


def decode_int8(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of an int8 weight, (N, D).

    >>> decode_int8(torch.tensor([[2, -4]], dtype=torch.int8), torch.tensor([0.5]), torch.float32)
    tensor([[ 1., -2.]])
    """
    scale = to_rows(scale)
    groups = scale.to(dtype).reshape(len(scale), -1, 1)
    return (to_rows(weight).to(dtype).unflatten(-1, (groups.shape[1], -1)) * groups).flatten(-2)


def decode_int4(
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    minimum: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return the values of a packed 4-bit weight, (N, D).

    >>> packed = pack_int4(torch.tensor([[8, 10]]))
    >>> decode_int4(packed, torch.tensor([[0.5]]), None, None, torch.float32)
    tensor([[0., 1.]])
    """
    scales = to_rows(scale).to(dtype)[..., None]
    groups = unpack_int4(to_rows(weight)).to(dtype).unflatten(-1, (scales.shape[1], -1))
    if minimum is not None:
        return (groups * scales + to_rows(minimum).to(dtype)[..., None]).flatten(-2)
    zero = 8 if zero_point is None else to_rows(zero_point).to(dtype)[..., None]
    return ((groups - zero) * scales).flatten(-2)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row to int8 with a scale in float32: `x` is about `q * scale[..., None]`.

    >>> quantize_rows(torch.tensor([[1.0, -127.0]]))
    (tensor([[   1, -127]], dtype=torch.int8), tensor([1.]))
    """
    wide = x.float()
    scale = wide.abs().amax(-1).clamp_min(_MIN_MAGNITUDE) / 127
    return (wide / scale[..., None]).round().to(torch.int8), scale


def round_activations(x: Tensor, group: int) -> Tensor:
    """Round x to int8 in groups of channels, and back; 0 is a group of the whole row.

    The gradient is that of the identity.

    >>> round_activations(torch.tensor([[63.6, 127.0, 0.1, 0.3]]), 2).tolist()
    [[64.0, 127.0, 0.09921..., 0.3...]]
    """
    return _RoundActivations.apply(x, group)  # pyright: ignore


class _RoundActivations(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        width = x.shape[-1]
        group = group or width
        groups = F.pad(x, (0, -width % group)).unflatten(-1, (-1, group))
        q, scale = quantize_rows(groups)
        rounded = q.to(x.dtype) * scale.to(x.dtype)[..., None]
        return rounded.flatten(-2)[..., :width]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def quantize_kv(x: Tensor) -> Tensor:
    """Quantize keys or values, (..., H), to rows of an int8 KV cache, (..., H + 4).

    >>> quantize_kv(torch.tensor([[1.0, -127.0]]))
    tensor([[   1, -127,    0,    0, -128,   63]], dtype=torch.int8)
    """
    q, scale = quantize_rows(x)
    return torch.cat((q, scale[..., None].view(torch.int8)), dim=-1)


def dequantize_kv(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values, (..., H), of rows of an int8 KV cache, rounded once.

    >>> dequantize_kv(quantize_kv(torch.tensor([[63.6, -127.0]])), torch.bfloat16)
    tensor([[  64., -127.]], dtype=torch.bfloat16)
    """
    q, scale = rows.split([rows.shape[-1] - KV_SCALE_BYTES, KV_SCALE_BYTES], dim=-1)
    aligned = scale.clone(memory_format=torch.contiguous_format).view(torch.float32)
    wide = accum_dtype(dtype)
    return (q.to(wide) * aligned.to(wide)).to(dtype)


def round_kv(x: Tensor) -> Tensor:
    """Round keys or values as an int8 KV cache does: to what `dequantize_kv` returns.

    The gradient is that of the identity.

    >>> round_kv(torch.tensor([[63.6, -127.0]]))
    tensor([[  64., -127.]])
    """
    return _RoundKV.apply(x)  # pyright: ignore


class _RoundKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return dequantize_kv(quantize_kv(x), x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def sample_int8(make: TensorMaker, rows: int, channels: int) -> tuple[Tensor, Tensor]:
    """Return a weight whose decoded values have a typical magnitude, and its scales."""
    weight = (make.ints(256, rows, channels) - 128).to(torch.int8)
    return weight, (make(rows).float().abs() + 0.5) / (90 * channels**0.5)


def sample_int4(
    make: TensorMaker, rows: int, channels: int, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight whose decoded values have a typical magnitude, its scales and zero points."""
    packed = make.ints(256, rows, channels // 2, dtype=torch.uint8)
    scale = (make(rows, channels // group).float().abs() + 0.5) / (6 * channels**0.5)
    return packed, scale, 7 + make(rows, channels // group).float()
