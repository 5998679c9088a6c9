"""What a quantization method is, and the simplest one.

Legend: N rows (output channels), D channels, G groups of channels.
"""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ingot.nn.formats import Grid, QuantizedTensors, WeightFormat

_SHRINKS = [1 - step / 50 for step in range(1, 16)]
_CHUNK = 1 << 17  # weights


class Method(Protocol):
    """Quantizes the weight of a layer; a calibrated method needs the inputs of the layer."""

    @property
    def calibrated(self) -> bool:
        """Whether it needs the inputs of the layer."""
        ...

    def encode(
        self, format: WeightFormat, weight_ND: Tensor, hessian_DD: Tensor | None
    ) -> QuantizedTensors:
        """Quantize a weight; `hessian` is the mean of x x^T over the inputs of the layer."""
        ...


@dataclass(frozen=True, kw_only=True)
class RoundToNearest:
    """Rounds each value to the nearest one of the grid of least squared error.

    >>> from ingot.nn.formats import Int4
    >>> weight = torch.linspace(-1, 1, 64).view(1, 64)
    >>> RoundToNearest().encode(Int4(), weight, None).scale.shape
    torch.Size([1, 2])
    """

    weighted: bool = False
    """Whether the error is weighted by the mean square of each input channel."""

    @property
    def calibrated(self) -> bool:
        """Whether it needs the inputs of the layer."""
        return self.weighted

    def encode(
        self, format: WeightFormat, weight_ND: Tensor, hessian_DD: Tensor | None
    ) -> QuantizedTensors:
        """Quantize a weight."""
        importance_D = hessian_DD.diagonal() if self.weighted and hessian_DD is not None else None
        grid = search_grid(format, weight_ND, importance_D)
        return format.pack(grid.round(weight_ND), grid)


def search_grid(
    format: WeightFormat, weight_ND: Tensor, importance_D: Tensor | None = None
) -> Grid:
    """Return the grid of least squared error: smaller ones clip a few values and round finer.

    >>> from ingot.nn.formats import Int4
    >>> weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    >>> search_grid(Int4(), weight).scale_NG.abs().sum() < Int4().grid(weight).scale_NG.abs().sum()
    tensor(True)
    """
    if importance_D is not None:
        importance_D = importance_D.contiguous()  # the diagonal of a matrix: 10 ns to read a value
    # In chunks: a temporary of the whole weight would be mapped and unmapped in each operation.
    chunks = weight_ND.split(max(1, _CHUNK // weight_ND.shape[1]))
    grids = [_search_rows(format, chunk_ND.float(), importance_D) for chunk_ND in chunks]
    scales, zeros = ([getattr(grid, name) for grid in grids] for name in ("scale_NG", "zero_NG"))
    return grids[0]._replace(scale_NG=torch.cat(scales), zero_NG=torch.cat(zeros))


def _search_rows(format: WeightFormat, weight_ND: Tensor, importance_D: Tensor | None) -> Grid:
    best = format.grid(weight_ND)
    least_NG = _error(best, weight_ND, importance_D)
    for shrink in _SHRINKS:
        grid = format.grid(weight_ND, shrink)
        error_NG = _error(grid, weight_ND, importance_D)
        better_NG = error_NG < least_NG
        least_NG = torch.where(better_NG, error_NG, least_NG)
        scale_NG = torch.where(better_NG, grid.scale_NG, best.scale_NG)
        zero_NG = torch.where(better_NG, grid.zero_NG, best.zero_NG)
        best = best._replace(scale_NG=scale_NG, zero_NG=zero_NG)
    return best


def _error(grid: Grid, weight_ND: Tensor, importance_D: Tensor | None) -> Tensor:
    error_ND = grid.decode(grid.round(weight_ND)).sub_(weight_ND).square_()
    if importance_D is not None:
        error_ND *= importance_D
    return error_ND.unflatten(1, (grid.scale_NG.shape[1], -1)).sum(-1)
