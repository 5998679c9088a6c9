"""`quantized` on GPUs: weights leave memory as they are, and become operands in registers.

Integers of 8 bits are floats without rounding, so their scale waits for the sums, in float32. Those
of 4 bits have a scale for each group: they are scaled in float32 and rounded to x's dtype once. A
step along the inner dimension never leaves a group.

The gradient of x is a product with the same weight, row by row: its scales lie along what is added
up, so they are multiplied in before. Gradients of scales are the reference's.

Where x is rounded too, one kernel rounds the rows and another multiplies integers, with sums in
int32. As in `linear.py`, nothing is split along the inner dimension and tiles do not depend on the
number of rows.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ingot import ops
from ingot.kernels.triton.kernel import Config, by_elements, kernel
from ingot.kernels.triton.linear import GROUP, itemsize, precision, swizzle, tile_space
from ingot.kernels.triton.provider import Meta, as_rows, provide
from ingot.kernels.triton.reduce import sum_rows
from ingot.kernels.triton.target import Target
from ingot.ops.gradient import Backward, differentiate
from ingot.ops.op import Op

_WIDEST = 4096  # channels of a row that are rounded at a time
_LEAST = tl.constexpr(2.0**-100)  # as in the reference
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: added and taken off, it leaves integers

# Rows, columns, warps, stages.
_TILES = ((64, 128, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (32, 128, 4, 4), (16, 128, 4, 4))


def _widened_space(
    target: Target, PRECISION: str, CHANNELS: int = 64, **_: object
) -> Iterator[Config]:
    """Tiles whose operands fit shared memory, x's and the widened weight's; within a group."""
    inner = 32 if PRECISION == "ieee" else min(64, CHANNELS)
    for rows, columns, warps, stages in _TILES:
        if PRECISION == "ieee":
            rows, columns, stages = min(rows, 64), min(columns, 64), 2
        stages = min(stages, 2) if target.backend == "hip" else stages
        shared = (rows + columns) * inner * itemsize(PRECISION) * stages
        if shared <= target.shared_program:
            yield Config.of(warps, stages, ROWS=rows, COLUMNS=columns, INNER=inner)


def _turned_space(target: Target, PRECISION: str, CHANNELS: int, **_: object) -> Iterator[Config]:
    """Tiles no wider than a group, where there are groups."""
    inner, columns = (32, 64) if PRECISION == "ieee" else (64, 128)
    columns = min(columns, CHANNELS or columns)
    for rows, warps, stages in ((64, 8, 3), (128, 8, 3), (64, 4, 2)):
        stages = min(stages, 2) if target.backend == "hip" else stages
        rows = min(rows, 64) if PRECISION == "ieee" else rows
        shared = (rows + columns) * inner * itemsize(PRECISION) * stages
        if shared <= target.shared_program:
            yield Config.of(warps, stages, ROWS=rows, COLUMNS=columns, INNER=inner)


def _integer_space(target: Target, **_: object) -> Iterator[Config]:
    """The tiles of halves with twice the channels: as many bytes."""
    for config in tile_space(target, 2):
        tile = dict(config.constants)
        yield Config.of(config.warps, config.stages, **tile | {"INNER": 2 * tile["INNER"]})


def _row_space(target: Target, TILE: int, **_: object) -> Iterator[Config]:
    yield from by_elements(target, TILE)


@triton.jit
def _tile(rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """The rows and columns of this program."""
    row_tile, column_tile = swizzle(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS), GROUP
    )
    row = row_tile * ROWS + tl.arange(0, ROWS)
    return row, column_tile * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _store(total, bias, y, row, column, rows, columns):
    """Sums in float32, with their bias."""
    if bias is not None:
        total += tl.load(bias + column, column < columns, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), inside)


@kernel(space=_widened_space, bound="tensor cores")
@triton.jit
def _linear_int8(
    x, w, scale, bias, y, rows, columns, depth, x_row, w_row,
    EVEN: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of the product with a weight of int8."""
    row, column = _tile(rows, columns, ROWS, COLUMNS, GROUP)
    inner = tl.arange(0, INNER)
    x_at = x + row.to(tl.int64)[:, None] * x_row + inner[None, :]
    w_at = w + column.to(tl.int64)[:, None] * w_row + inner[None, :]
    x_inside, w_inside = (row < rows)[:, None], (column < columns)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, depth, INNER):
        if EVEN:
            weight = tl.load(w_at, w_inside, other=0)
            values = tl.load(x_at, x_inside, other=0.0)
        else:
            left = inner < depth - first
            weight = tl.load(w_at, w_inside & left[None, :], other=0)
            values = tl.load(x_at, x_inside & left[None, :], other=0.0)
        wide = tl.trans(weight.to(x.dtype.element_ty))
        total = tl.dot(values, wide, total, input_precision=PRECISION)
        x_at += INNER
        w_at += INNER
    total *= tl.load(scale + column, column < columns, other=0.0).to(tl.float32)[None, :]
    _store(total, bias, y, row, column, rows, columns)


@kernel(space=_widened_space, bound="tensor cores")
@triton.jit
def _linear_int4(
    x, w, scale, zero, bias, y, rows, columns, depth, x_row, w_row, scale_row,
    CHANNELS: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of the product with a weight of 4 bits, in groups of so many channels."""
    row, column = _tile(rows, columns, ROWS, COLUMNS, GROUP)
    byte = tl.arange(0, INNER // 2)
    x_at = x + row.to(tl.int64)[:, None] * x_row + tl.arange(0, INNER)[None, :]
    w_at = w + column.to(tl.int64)[:, None] * w_row + byte[None, :]
    group_at = column.to(tl.int64) * scale_row
    there = column < columns
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, depth, INNER):
        group = first // CHANNELS
        packed = tl.load(w_at, there[:, None], other=0)
        values = tl.load(x_at, (row < rows)[:, None], other=0.0)
        step = tl.load(scale + group_at + group, there, other=0.0).to(tl.float32)
        middle = 8.0
        if zero is not None:
            middle = tl.load(zero + group_at + group, there, other=0.0).to(tl.float32)[:, None]
        low = ((packed & 15).to(tl.float32) - middle) * step[:, None]
        high = ((packed >> 4).to(tl.float32) - middle) * step[:, None]
        halves = tl.join(low.to(x.dtype.element_ty), high.to(x.dtype.element_ty))
        weight = tl.reshape(halves, [COLUMNS, INNER])
        total = tl.dot(values, tl.trans(weight), total, input_precision=PRECISION)
        x_at += INNER
        w_at += INNER // 2
    _store(total, bias, y, row, column, rows, columns)


@kernel(space=_turned_space, bound="tensor cores")
@triton.jit
def _linear_quantized_backward(
    grad, w, scale, zero, of_x, rows, columns, depth, grad_row, w_row, scale_row,
    CHANNELS: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of x; within a group, if there are groups."""
    row_tile, column_tile = swizzle(
        tl.program_id(0), tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS), GROUP
    )
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    out = tl.arange(0, INNER)
    grad_at = grad + row.to(tl.int64)[:, None] * grad_row + out[None, :]
    scale_at = out.to(tl.int64) * scale_row
    if CHANNELS:
        scale_at += column_tile * COLUMNS // CHANNELS
        byte = column_tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        w_at = w + out.to(tl.int64)[:, None] * w_row + byte[None, :]
        inside = tl.full([COLUMNS // 2], True, tl.int1)[None, :]
    else:
        w_at = w + out.to(tl.int64)[:, None] * w_row + column[None, :]
        inside = (column < columns)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, depth, INNER):
        left = out < depth - first
        if EVEN:
            left = out < INNER
        values = tl.load(grad_at, (row < rows)[:, None] & left[None, :], other=0.0)
        weight = tl.load(w_at, inside & left[:, None], other=0)
        step = tl.load(scale + scale_at, left, other=0.0).to(tl.float32)[:, None]
        if CHANNELS:
            middle = 8.0
            if zero is not None:
                middle = tl.load(zero + scale_at, left, other=0.0).to(tl.float32)[:, None]
            low = ((weight & 15).to(tl.float32) - middle) * step
            high = ((weight >> 4).to(tl.float32) - middle) * step
            halves = tl.join(low.to(grad.dtype.element_ty), high.to(grad.dtype.element_ty))
            wide = tl.reshape(halves, [INNER, COLUMNS])
        else:
            wide = (weight.to(tl.float32) * step).to(grad.dtype.element_ty)
        total = tl.dot(values, wide, total, input_precision=PRECISION)
        grad_at += INNER
        w_at += INNER * w_row
        scale_at += INNER * scale_row
    _store(total, None, of_x, row, column, rows, columns)


@triton.jit
def _magnitude(x):
    """The largest magnitude; infinite, if a value is not a number."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 0)


@kernel(space=_row_space, bound="bandwidth")
@triton.jit
def _quantize_rows(x, q, steps, width, x_row, WHOLE: tl.constexpr, TILE: tl.constexpr):
    """A row as int8, and its step. A long one is read twice."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, TILE)
    values = tl.load(x + row * x_row + channel, channel < width, other=0.0).to(tl.float32)
    largest = _magnitude(values)
    if not WHOLE:
        for first in range(TILE, width, TILE):
            at = first + channel
            more = tl.load(x + row * x_row + at, at < width, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, _magnitude(more))
    step = tl.div_rn(tl.maximum(largest, _LEAST), 127.0)
    tl.store(steps + row, step)
    # A quotient is rounded before the sum, as a product might not be: halves go to the even one.
    rounded = (tl.div_rn(values, step) + _ROUND) - _ROUND
    tl.store(q + row * width + channel, rounded.to(tl.int8), channel < width)
    if not WHOLE:
        for first in range(TILE, width, TILE):
            at = first + channel
            more = tl.load(x + row * x_row + at, at < width, other=0.0).to(tl.float32)
            rounded = (tl.div_rn(more, step) + _ROUND) - _ROUND
            tl.store(q + row * width + at, rounded.to(tl.int8), at < width)


@kernel(space=_integer_space, bound="tensor cores")
@triton.jit
def _linear_int8_dynamic(
    q, w, steps, scale, bias, y, rows, columns, depth, w_row,
    EVEN: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of the product of integers, and its scales."""
    row, column = _tile(rows, columns, ROWS, COLUMNS, GROUP)
    inner = tl.arange(0, INNER)
    q_at = q + row.to(tl.int64)[:, None] * depth + inner[None, :]
    w_at = w + column.to(tl.int64)[None, :] * w_row + inner[:, None]
    row_inside, column_inside = (row < rows)[:, None], (column < columns)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.int32)
    for first in range(0, depth, INNER):
        if EVEN:
            a = tl.load(q_at, row_inside, other=0)
            b = tl.load(w_at, column_inside, other=0)
        else:
            left = inner < depth - first
            a = tl.load(q_at, row_inside & left[None, :], other=0)
            b = tl.load(w_at, column_inside & left[:, None], other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
        q_at += INNER
        w_at += INNER
    result = total.to(tl.float32) * tl.load(steps + row, row < rows, other=0.0)[:, None]
    result *= tl.load(scale + column, column < columns, other=0.0).to(tl.float32)[None, :]
    _store(result, bias, y, row, column, rows, columns)


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _whole(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _grid(rows: int, columns: int) -> Any:
    def grid(constants: dict[str, Any]) -> tuple[int]:
        down = triton.cdiv(rows, constants["ROWS"])
        return (down * triton.cdiv(columns, constants["COLUMNS"]),)

    return grid


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """One kernel."""
    rows, weight = as_rows(x), _side_by_side(weight)
    (count, depth), columns = rows.shape, len(weight)
    y = x.new_empty((*x.shape[:-1], columns))
    _linear_int8.launch(
        _grid(count, columns),
        *(rows, weight, scale.contiguous(), _whole(bias), y, count, columns, depth),
        *(rows.stride(0), weight.stride(0)),
        EVEN=depth % 64 == 0,
        PRECISION=precision(x.dtype),
        GROUP=GROUP,
        shape=(columns, depth),
    )
    return y


def linear_int4(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None
) -> Tensor:
    """One kernel."""
    rows, weight, scale = as_rows(x), _side_by_side(weight), scale.contiguous()
    (count, depth), columns = rows.shape, len(weight)
    y = x.new_empty((*x.shape[:-1], columns))
    _linear_int4.launch(
        _grid(count, columns),
        *(rows, weight, scale, _whole(zero), _whole(bias), y, count, columns, depth),
        *(rows.stride(0), weight.stride(0), scale.stride(0)),
        CHANNELS=depth // scale.shape[1],
        PRECISION=precision(x.dtype),
        GROUP=GROUP,
        shape=(columns, depth),
    )
    return y


def _of_x(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
    """The gradient of x; scales of groups are (out, groups)."""
    weight, scale = _side_by_side(weight), scale.contiguous()
    (count, depth), columns = grad.shape, x.shape[-1]
    of_x = x.new_empty(x.shape)
    _linear_quantized_backward.launch(
        _grid(count, columns),
        *(grad, weight, scale, _whole(zero), of_x, count, columns, depth),
        *(grad.stride(0), weight.stride(0), scale.stride(0)),
        CHANNELS=columns // scale.shape[1] if scale.dim() == 2 else 0,
        EVEN=depth % 64 == 0,
        PRECISION=precision(x.dtype),
        GROUP=GROUP,
        shape=(columns, depth),
    )
    return of_x


def _backward(op: Op[..., Any]) -> Backward:
    """Of x by a kernel, of the bias by a sum, of scales and zeros as the reference has it."""

    def backward(needs: list[bool], grads: list[Tensor], *args: Any) -> list[Tensor | None]:
        x, weight, scale, *_ = args
        grad = as_rows(grads[0])
        found: list[Tensor | None] = [None] * len(args)
        rare = [False, False, *needs[2:-1], False]
        if any(rare):
            found = list(differentiate(op.fallback)(rare, grads, *args))
        if needs[0]:
            found[0] = _of_x(grad, x, weight, scale, args[3] if len(args) == 5 else None)
        if needs[-1]:
            found[-1] = sum_rows(grad, grad.dtype)
        return found

    return backward


def linear_int8_dynamic(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Two kernels: rounding, and the product."""
    rows, weight = as_rows(x), _side_by_side(weight)
    (count, depth), columns = rows.shape, len(weight)
    q = x.new_empty((count, depth), dtype=torch.int8)
    steps = x.new_empty((count,), dtype=torch.float32)
    tile = min(_WIDEST, triton.next_power_of_2(depth))
    _quantize_rows.launch(
        *((count,), rows, q, steps, depth, rows.stride(0)), WHOLE=depth <= tile, TILE=tile
    )
    y = x.new_empty((*x.shape[:-1], columns))
    _linear_int8_dynamic.launch(
        _grid(count, columns),
        *(q, weight, steps, scale.contiguous(), _whole(bias), y, count, columns, depth),
        weight.stride(0),
        EVEN=depth % 128 == 0,
        GROUP=GROUP,
        shape=(columns, depth),
    )
    return y


def _fits(x: Tensor, weight: Tensor, *_: object) -> bool:
    return x.numel() > 0 and weight.numel() > 0


def _int8_example(make: Meta) -> tuple[Any, ...]:
    weight = make.ints(4096, 4096, dtype=torch.int8)
    return make(4096, 4096), weight, make(4096, dtype=torch.float32), make(4096)


def _int4_example(make: Meta, group: int = 128) -> tuple[Any, ...]:
    weight = make.ints(4096, 2048, dtype=torch.uint8)
    scale = make(4096, 4096 // group)
    return make(4096, 4096), weight, scale, scale, make(4096)


def _int4_small(make: Meta) -> tuple[Any, ...]:
    return _int4_example(make, 32)


provide(
    ops.linear_int8,
    linear_int8,
    example=_int8_example,
    supports=_fits,
    backward=_backward(ops.linear_int8),
)
provide(ops.linear_int8_dynamic, linear_int8_dynamic, example=_int8_example, supports=_fits)
provide(
    ops.linear_int4,
    linear_int4,
    example=_int4_example,
    supports=_fits,
    backward=_backward(ops.linear_int4),
    also=(_int4_small,),
)
