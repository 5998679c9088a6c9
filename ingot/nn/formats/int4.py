"""Weights of 4 bits, with a scale per row and group of channels.

symmetric    scale * (q - 8)             4.5 bits per weight in groups of 32, 4.25 of 64
zero_point   scale * (q - zero_point)    4.75 bits in groups of 32, 4.5 of 64
minimum      scale * q + minimum         the same: GGUF's Q4_1
"""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ingot import ops
from ingot.core.errors import ConfigError
from ingot.nn.formats.format import (
    LinearEpilogue,
    QuantizedTensors,
    check_channels,
    check_group,
    empty_groups,
)
from ingot.ops.quantized import pack_int4, unpack_int4


@dataclass(frozen=True, kw_only=True)
class Int4:
    """4 bits in groups of 32, 64 or 128 channels.

    >>> weight = torch.linspace(-1, 1, 64).view(1, 64)
    >>> format = Int4(group=32)
    >>> (format.decode(format.encode(weight)) - weight).abs().max() < 0.08
    tensor(True)
    """

    group: int = 32
    """Channels that share a scale."""
    zero_point: bool = False
    """Whether a group has a zero point of its own."""
    minimum: bool = False
    """Whether a group has a minimum instead of a zero."""
    scale_dtype: torch.dtype = torch.bfloat16
    """Dtype of scales, zero points and minima."""

    def __post_init__(self) -> None:
        check_group("int4", self.group)
        if self.zero_point and self.minimum:
            raise ConfigError("int4: zero_point and minimum", hint="choose at most one of them")

    def empty(self, rows: int, channels: int, device: torch.device | str) -> QuantizedTensors:
        """Allocate the tensors of a weight (N, D)."""
        check_channels("int4", channels, self.group)

        def values() -> Tensor:
            return empty_groups(channels // self.group, rows, self.scale_dtype, device)

        return QuantizedTensors(
            weight=torch.empty(rows, channels // 2, dtype=torch.uint8, device=device),
            scale=values(),
            zero_point=values() if self.zero_point else None,
            minimum=values() if self.minimum else None,
        )

    def encode(self, weight_ND: Tensor) -> QuantizedTensors:
        """Quantize a weight by rounding to nearest.

        A symmetric scale maps the value of largest magnitude to -8, which has no positive
        counterpart; the others span the values from the least to the largest.
        """
        rows, channels = weight_ND.shape
        tensors = self.empty(rows, channels, weight_ND.device)
        values_NGC = weight_ND.float().unflatten(1, (-1, self.group))
        if self.zero_point or self.minimum:
            low, high = values_NGC.amin(-1).clamp_max(0), values_NGC.amax(-1).clamp_min(0)
            if self.minimum:
                low = values_NGC.amin(-1)
            tensors.scale.copy_((high - low) / 15)
        else:
            largest = values_NGC.abs().amax(-1, keepdim=True)
            index = values_NGC.abs().argmax(-1, keepdim=True)
            signed = values_NGC.gather(-1, index).sign() * largest
            tensors.scale.copy_(signed.squeeze(-1) / -8)
            low = torch.zeros_like(tensors.scale, dtype=torch.float32)
        scale = tensors.scale.float()
        divisor = torch.where(scale == 0, 1, scale)
        if tensors.zero_point is not None:
            tensors.zero_point.copy_((-low / divisor).round().clamp(0, 15))
            offset = tensors.zero_point.float()
        elif tensors.minimum is not None:
            tensors.minimum.copy_(low)
            offset = -tensors.minimum.float() / divisor
        else:
            offset = torch.full_like(scale, 8)
        q = (values_NGC / divisor[..., None] + offset[..., None]).round().clamp(0, 15)
        tensors.weight.copy_(pack_int4(q.flatten(1).to(torch.uint8)))
        return tensors

    def decode(self, tensors: QuantizedTensors) -> Tensor:
        """Return the weight (N, D) in float32."""
        q = unpack_int4(tensors.weight).float().unflatten(1, (-1, self.group))
        scale = tensors.scale.float()[..., None]
        if tensors.minimum is not None:
            return (q * scale + tensors.minimum.float()[..., None]).flatten(1)
        zero = 8 if tensors.zero_point is None else tensors.zero_point.float()[..., None]
        return ((q - zero) * scale).flatten(1)

    def linear(self, x: Tensor, tensors: QuantizedTensors, epilogue: LinearEpilogue) -> Tensor:
        """Apply a linear layer with this weight; x is quantized to int8 row by row."""
        return ops.linear_int4_dynamic(x, *tensors, *epilogue)

    def embedding(self, tokens: Tensor, tensors: QuantizedTensors, bf16: bool) -> Tensor:
        """Return the rows of these tokens, in bfloat16 or in float32."""
        return ops.embedding_int4(tokens, *tensors, bf16)
