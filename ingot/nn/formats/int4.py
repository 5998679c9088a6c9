"""Weights of 4 bits, with a scale per row and group of channels.

    symmetric    scale * (q - 8)             4.5 bits per weight in groups of 32, 4.25 of 64
    zero_point   scale * (q - zero_point)    5 bits in groups of 32, 4.5 of 64
    minimum      scale * q + minimum         the same: GGUF's Q4_1

A directory has zero points of 4 bits, in memory they have the dtype of the scales.
"""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ingot import ops
from ingot.core.errors import ConfigError
from ingot.nn.formats.format import (
    Grid,
    LinearEpilogue,
    QuantizedTensors,
    check_channels,
    check_group,
    empty_groups,
    format_repr,
)
from ingot.ops.codec import decode_int4, pack_int4


@dataclass(frozen=True, kw_only=True, repr=False)
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

    def __repr__(self) -> str:
        return format_repr(self)

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

    def grid(self, weight_ND: Tensor, shrink: float = 1.0) -> Grid:
        """Return the grid that spans the values of each group, or a smaller one that clips some.

        A symmetric scale maps the value of largest magnitude to -8, which has no positive
        counterpart; the others span the values from the least to the largest.
        """
        check_channels("int4", weight_ND.shape[1], self.group)
        values_NGC = weight_ND.float().unflatten(1, (-1, self.group))
        low, high = shrink * values_NGC.amin(-1), shrink * values_NGC.amax(-1)
        if self.zero_point:  # 0 is representable
            low, high = low.clamp_max(0), high.clamp_min(0)
        symmetric = torch.where(high > -low, high, low) / -8
        scale = (high - low) / 15 if self.zero_point or self.minimum else symmetric
        scale = self._round(scale)
        divisor = torch.where(scale == 0, 1, scale)
        if self.minimum:
            zero = -self._round(low) / divisor
        elif self.zero_point:
            zero = (-low / divisor).round().clamp(0, 15)
        else:
            zero = torch.full_like(scale, 8)
        return Grid(scale, zero, 0, 15)

    def pack(self, q_ND: Tensor, grid: Grid) -> QuantizedTensors:
        """Return the tensors of a weight that has these integers on the grid."""
        rows, channels = q_ND.shape
        tensors = self.empty(rows, channels, q_ND.device)
        tensors.weight.copy_(pack_int4(q_ND.to(torch.uint8)))
        tensors.scale.copy_(grid.scale_NG)
        if tensors.zero_point is not None:
            tensors.zero_point.copy_(grid.zero_NG)
        if tensors.minimum is not None:
            divisor_NG = torch.where(grid.scale_NG == 0, 1, grid.scale_NG)
            tensors.minimum.copy_(-grid.zero_NG * divisor_NG)
        return tensors

    def encode(self, weight_ND: Tensor) -> QuantizedTensors:
        """Quantize a weight by rounding to nearest."""
        grid = self.grid(weight_ND)
        return self.pack(grid.round(weight_ND), grid)

    def _round(self, values: Tensor) -> Tensor:
        return values.to(self.scale_dtype).float()

    def decode(self, tensors: QuantizedTensors) -> Tensor:
        """Return the weight (N, D) in float32."""
        return decode_int4(*tensors, torch.float32)

    def linear(self, x: Tensor, tensors: QuantizedTensors, epilogue: LinearEpilogue) -> Tensor:
        """Apply a linear layer with this weight; x is quantized to int8 row by row."""
        return ops.linear_int4_dynamic(x, *tensors, *epilogue)

    def embedding(self, tokens: Tensor, tensors: QuantizedTensors, bf16: bool) -> Tensor:
        """Return the rows of these tokens, in bfloat16 or in float32."""
        return ops.embedding_int4(tokens, *tensors, bf16)
