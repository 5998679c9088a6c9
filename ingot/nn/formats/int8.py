"""Weights of 8 bits, symmetric, with a scale per row or per row and group of channels."""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ingot import ops
from ingot.nn.formats.format import (
    Grid,
    LinearEpilogue,
    QuantizedTensors,
    check_channels,
    check_group,
    empty_groups,
    format_repr,
)
from ingot.ops.codec import decode_int8

# Channels of x that share a scale where the weight has one per row. A few channels of decoders are
# much larger than the rest, which loses precision next to them.
X_GROUP = 32


@dataclass(frozen=True, kw_only=True, repr=False)
class Int8:
    """8 bits with a scale per row, or in groups of 16, 32, 64 or 128 channels.

    >>> weight = torch.linspace(-1, 1, 64).view(1, 64)
    >>> (Int8().decode(Int8().encode(weight)) - weight).abs().max() < 0.004
    tensor(True)
    """

    group: int | None = None
    """Channels that share a scale; None for all channels of a row."""
    scale_dtype: torch.dtype = torch.bfloat16
    """Dtype of the scales."""

    def __repr__(self) -> str:
        return format_repr(self)

    def __post_init__(self) -> None:
        if self.group is not None:
            check_group("int8", self.group)

    def empty(self, rows: int, channels: int, device: torch.device | str) -> QuantizedTensors:
        """Allocate the tensors of a weight (N, D)."""
        weight = torch.empty(rows, channels, dtype=torch.int8, device=device)
        if self.group is None:
            return QuantizedTensors(
                weight, torch.empty(rows, dtype=self.scale_dtype, device=device)
            )
        check_channels("int8", channels, self.group)
        groups = channels // self.group
        return QuantizedTensors(weight, empty_groups(groups, rows, self.scale_dtype, device))

    def grid(self, weight_ND: Tensor, shrink: float = 1.0) -> Grid:
        """Return the grid that spans the values of each group, or a smaller one that clips some."""
        channels = weight_ND.shape[1]
        check_channels("int8", channels, self.group or channels)
        values_NGC = weight_ND.float().unflatten(1, (-1, self.group or channels))
        scale_NG = (shrink * values_NGC.abs().amax(-1) / 127).to(self.scale_dtype).float()
        return Grid(scale_NG, torch.zeros_like(scale_NG), -127, 127)

    def pack(self, q_ND: Tensor, grid: Grid) -> QuantizedTensors:
        """Return the tensors of a weight that has these integers on the grid."""
        rows, channels = q_ND.shape
        tensors = self.empty(rows, channels, q_ND.device)
        tensors.weight.copy_(q_ND)
        tensors.scale.copy_(grid.scale_NG.view(tensors.scale.shape))
        return tensors

    def encode(self, weight_ND: Tensor) -> QuantizedTensors:
        """Quantize a weight by rounding to nearest."""
        grid = self.grid(weight_ND)
        return self.pack(grid.round(weight_ND), grid)

    def decode(self, tensors: QuantizedTensors) -> Tensor:
        """Return the weight (N, D) in float32."""
        return decode_int8(tensors.weight, tensors.scale, torch.float32)

    def linear(self, x: Tensor, tensors: QuantizedTensors, epilogue: LinearEpilogue) -> Tensor:
        """Apply a linear layer with this weight; x is quantized to int8 row by row."""
        x_group = X_GROUP if self.group is None else 0
        return ops.linear_int8_dynamic(
            *(x, tensors.weight, tensors.scale),
            *(epilogue.bias, epilogue.activation, epilogue.residual, x_group, epilogue.gated),
            *(epilogue.lora_h, epilogue.lora_b, epilogue.lora_index, epilogue.to_float32),
        )

    def embedding(self, tokens: Tensor, tensors: QuantizedTensors, bf16: bool) -> Tensor:
        """Return the rows of these tokens, in bfloat16 or in float32."""
        return ops.embedding_int8(tokens, tensors.weight, tensors.scale, bf16)
