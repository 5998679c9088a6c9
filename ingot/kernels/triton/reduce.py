"""Sums down the rows of a matrix, for the gradients of what all rows share.

In two steps: `PARTS` programs each add up every `PARTS`-th tile of rows, then their sums are added
up. How many there are never depends on the GPU, so neither do the bits.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ingot.kernels.triton.kernel import Config, kernel
from ingot.kernels.triton.target import Target

PARTS = 256
_ROWS = 16  # rows of a tile


def _space(target: Target, **_: object) -> Iterator[Config]:
    for warps in (4, 8, 2):
        yield Config.of(warps)


@kernel(space=_space, bound="bandwidth")
@triton.jit
def _sum_rows(x, out, rows, width, x_row, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of every so-manieth tile of rows, one line of `out` for each program of axis 1."""
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    part = tl.program_id(1)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(part * ROWS, rows, tl.num_programs(1) * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        at = row[:, None].to(tl.int64) * x_row + column[None, :]
        total += tl.load(x + at, inside, other=0.0).to(tl.float32)
    sums = tl.sum(total, 0)
    tl.store(out + part * width + column, sums.to(out.dtype.element_ty), column < width)


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of all rows of (M, N), in float32, rounded once."""
    rows, width = x.shape
    parts = min(PARTS, triton.cdiv(rows, _ROWS))
    if parts > 1:
        partial = x.new_empty((parts, width), dtype=torch.float32)
        _launch(x, partial, parts)
        x = partial
    out = x.new_empty((1, width), dtype=dtype)
    _launch(x, out, 1)
    return out[0]


def _launch(x: Tensor, out: Tensor, parts: int) -> None:
    rows, width = x.shape
    tile = min(256, triton.next_power_of_2(width))
    grid = (triton.cdiv(width, tile), parts)
    _sum_rows.launch(grid, x, out, rows, width, x.stride(0), ROWS=_ROWS, WIDTH=tile)
