"""What a weight format has, and what the formats share."""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ingot.core.errors import ConfigError
from ingot.ops.codec import GROUP_SIZES, INT8_GROUP_SIZES
from ingot.ops.epilogue import IDENTITY


class QuantizedTensors(NamedTuple):
    """The tensors of a quantized weight; `scale` and the offsets are (N,) or (N, G)."""

    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    minimum: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> QuantizedTensors:
        """Apply a function to each tensor."""
        return QuantizedTensors(*(None if t is None else function(t) for t in self))  # pyright: ignore


class Grid(NamedTuple):
    """The values that a weight may have: `scale * (q - zero)` for integers q from low to high."""

    scale_NG: Tensor
    """In float32, and representable in the dtype of the format's scales; so is the zero."""
    zero_NG: Tensor
    low: int
    high: int

    def round(self, weight_ND: Tensor) -> Tensor:
        """Return the nearest q of each weight, (N, D), in float32.

        >>> grid = Grid(torch.tensor([[0.5]]), torch.tensor([[8.0]]), 0, 15)
        >>> grid.round(torch.tensor([[-0.6, 9.0]]))
        tensor([[ 7., 15.]])
        """
        divisor_NG = torch.where(self.scale_NG == 0, 1, self.scale_NG)
        q_NGC = self._groups(weight_ND.float()) / divisor_NG[..., None]
        q_NGC.add_(self.zero_NG[..., None]).round_().clamp_(self.low, self.high)
        return q_NGC.flatten(1)

    def decode(self, q_ND: Tensor) -> Tensor:
        """Return the values of integers, (N, D), in float32."""
        values_NGC = (self._groups(q_ND) - self.zero_NG[..., None]).mul_(self.scale_NG[..., None])
        return values_NGC.flatten(1)

    def _groups(self, values_ND: Tensor) -> Tensor:
        return values_ND.unflatten(1, (self.scale_NG.shape[1], -1))


class LinearEpilogue(NamedTuple):
    """The epilogue of a linear layer: see `ops.linear_int4_dynamic`."""

    bias: Tensor | None = None
    activation: int = IDENTITY
    residual: Tensor | None = None
    gated: bool = False
    lora_h: Tensor | None = None
    lora_b: Tensor | None = None
    lora_index: Tensor | None = None
    to_float32: bool = False


@runtime_checkable
class WeightFormat(Protocol):
    """A format of quantized weights."""

    @property
    def scale_dtype(self) -> torch.dtype:
        """Dtype of the scales."""
        ...

    def empty(self, rows: int, channels: int, device: torch.device | str) -> QuantizedTensors:
        """Allocate the tensors of a weight (N, D)."""
        ...

    def grid(self, weight_ND: Tensor, shrink: float = 1.0) -> Grid:
        """Return the grid that spans the values of each group, or a smaller one that clips some."""
        ...

    def pack(self, q_ND: Tensor, grid: Grid) -> QuantizedTensors:
        """Return the tensors of a weight that has these integers on the grid."""
        ...

    def encode(self, weight_ND: Tensor) -> QuantizedTensors:
        """Quantize a weight by rounding to nearest."""
        ...

    def decode(self, tensors: QuantizedTensors) -> Tensor:
        """Return the weight (N, D) in float32."""
        ...

    def linear(self, x: Tensor, tensors: QuantizedTensors, epilogue: LinearEpilogue) -> Tensor:
        """Apply a linear layer with this weight; x is quantized to int8 row by row."""
        ...

    def embedding(self, tokens: Tensor, tensors: QuantizedTensors, bf16: bool) -> Tensor:
        """Return the rows of these tokens, in bfloat16 or in float32."""
        ...


def format_repr(format: Any) -> str:
    """Return a format as it is constructed: its group size, and what is not a default.

    >>> from ingot.nn.formats import Int4, Int8
    >>> Int4(group=32, zero_point=True), Int8()
    (Int4(group=32, zero_point=True), Int8())
    """
    values = {field.name: getattr(format, field.name) for field in fields(format)}
    defaults = {field.name: field.default for field in fields(format)}
    shown = [
        f"{name}={value!r}"
        for name, value in values.items()
        if value != defaults[name] or (name == "group" and value)
    ]
    return f"{type(format).__name__}({', '.join(shown)})"


def empty_groups(groups: int, rows: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Allocate values per row and group, (N, G), with those of adjacent rows adjacent."""
    return torch.empty(groups, rows, dtype=dtype, device=device).T


def check_channels(name: str, channels: int, group: int) -> None:
    """Require that groups divide the channels.

    >>> check_channels("int4", 576, 64)
    """
    if channels % group:
        raise ConfigError(
            f"{name}: {channels} channels are not a multiple of the group size {group}",
            hint=f"use a group size of {', '.join(str(g) for g in GROUP_SIZES if g < group)}"
            if group > GROUP_SIZES[0]
            else "leave this layer in bfloat16",
        )


def check_group(name: str, group: int) -> None:
    """Require a supported group size.

    >>> check_group("int4", 64)
    """
    sizes = INT8_GROUP_SIZES if name == "int8" else GROUP_SIZES
    if group not in sizes:
        raise ConfigError(
            f"{name}: group must be one of {', '.join(map(str, sizes))}, got {group}",
            hint="choose one of them",
        )
