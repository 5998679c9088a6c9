"""`norm` on GPUs: a row, or several short ones, in the registers of a program.

Forward reads a row once, and the weight once a program: there are at most `PARTS` programs, which
walk through the rows with the weight in registers and the next rows on their way. Backward computes
the row's statistics again rather than have the forward store them, and adds up the gradients of
weight and bias over its share of the rows in registers; `reduce.py` adds up the shares.
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
from ingot.kernels.triton.provider import Meta, as_rows, provide
from ingot.kernels.triton.reduce import PARTS, sum_rows
from ingot.kernels.triton.target import Target
from ingot.ops.gradient import Backward

WIDEST = 16384  # channels that fit the registers of a program
_TILE = 2048  # elements of a tile of short rows


def _space(target: Target, ROWS: int, WIDTH: int, **_: object) -> Iterator[Config]:
    yield from by_elements(target, ROWS * WIDTH)


def _forward_space(target: Target, ROWS: int, WIDTH: int, **_: object) -> Iterator[Config]:
    for config in by_elements(target, ROWS * WIDTH):
        for ahead in (3, 1):
            yield Config.of(config.warps, AHEAD=ahead)


@triton.jit
def _statistics(total, inside, width, eps, CENTRED: tl.constexpr):
    """Rows without their mean if it is to go, and the reciprocal of their scale."""
    centred = total
    if CENTRED:
        mean = tl.sum(total, 1) / width
        centred = tl.where(inside, total - mean[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / width + eps)
    return centred, scale


@kernel(space=_forward_space, bound="bandwidth")
@triton.jit
def _norm(
    x, residual, weight, bias, y, total, rows, width, x_row, residual_row, eps,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Normalize every so-manieth tile of rows; with a residual, their sum with it, which is stored
    too. While a tile is computed the next are on their way, AHEAD - 1 of them."""
    column = tl.arange(0, WIDTH)[None, :]
    scales = tl.load(weight + column, column < width, other=0.0)
    shifts = scales
    if bias is not None:
        shifts = tl.load(bias + column, column < width, other=0.0)
    first, step = tl.program_id(0) * ROWS, tl.num_programs(0) * ROWS
    for start in tl.range(first, rows, step, num_stages=AHEAD):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < width)
        values = tl.load(x + row * x_row + column, inside, other=0.0).to(tl.float32)
        if residual is not None:
            added = tl.load(residual + row * residual_row + column, inside, other=0.0)
            values += added.to(tl.float32)
            tl.store(total + row * width + column, values.to(total.dtype.element_ty), inside)
        centred, scale = _statistics(values, inside, width, eps, CENTRED)
        result = centred * scale[:, None] * scales.to(tl.float32)
        if bias is not None:
            result += shifts.to(tl.float32)
        tl.store(y + row * width + column, result.to(y.dtype.element_ty), inside)


@kernel(space=_space, bound="bandwidth")
@triton.jit
def _norm_backward(
    x, residual, weight, grad, total_grad, x_grad, weight_grad, bias_grad,
    rows, width, x_row, residual_row, eps,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of every so-manieth tile of rows, and this program's share of the weight's."""
    column = tl.arange(0, WIDTH)[None, :]
    scales = tl.load(weight + column, column < width, other=0.0).to(tl.float32)
    of_weight = tl.zeros([ROWS, WIDTH], tl.float32)
    of_bias = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (column < width)
        values = tl.load(x + row * x_row + column, inside, other=0.0).to(tl.float32)
        if residual is not None:
            values += tl.load(residual + row * residual_row + column, inside, other=0.0).to(
                tl.float32
            )
        given = tl.load(grad + row * width + column, inside, other=0.0).to(tl.float32)
        centred, scale = _statistics(values, inside, width, eps, CENTRED)
        normal = centred * scale[:, None]
        if weight_grad is not None:
            of_weight += given * normal
        if bias_grad is not None:
            of_bias += given
        scaled = given * scales
        inner = scaled - normal * (tl.sum(scaled * normal, 1) / width)[:, None]
        if CENTRED:
            inner -= (tl.sum(scaled, 1) / width)[:, None]
        result = inner * scale[:, None]
        if total_grad is not None:
            result += tl.load(total_grad + row * width + column, inside, other=0.0).to(tl.float32)
        tl.store(x_grad + row * width + column, result.to(x_grad.dtype.element_ty), inside)
    at = tl.program_id(0) * width + tl.arange(0, WIDTH)
    inside_width = tl.arange(0, WIDTH) < width
    if weight_grad is not None:
        tl.store(weight_grad + at, tl.sum(of_weight, 0), inside_width)
    if bias_grad is not None:
        tl.store(bias_grad + at, tl.sum(of_bias, 0), inside_width)


def _tile(width: int) -> dict[str, int]:
    padded = triton.next_power_of_2(width)
    return {"ROWS": max(1, _TILE // padded), "WIDTH": padded}


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    shape, x = x.shape, as_rows(x)
    residual = residual if residual is None else as_rows(residual)
    y = x.new_empty(x.shape)
    total = y if residual is None else x.new_empty(x.shape)
    rows, width = x.shape
    tile = _tile(width)
    residual_row = 0 if residual is None else residual.stride(0)
    _norm.launch(
        (min(PARTS, triton.cdiv(rows, tile["ROWS"])),),
        *(x, residual, weight.contiguous(), bias if bias is None else bias.contiguous(), y, total),
        *(rows, width, x.stride(0), residual_row, eps),
        CENTRED=centred,
        **tile,
    )
    return y.view(shape), total.view(shape)


def _gradients(
    grads: list[Tensor],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    needs_weight: bool,
    needs_bias: bool,
    eps: float,
    centred: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of x, of the weight and of the bias."""
    shape, x = x.shape, as_rows(x)
    residual = residual if residual is None else as_rows(residual)
    rows, width = x.shape
    tile = _tile(width)
    programs = min(PARTS, triton.cdiv(rows, tile["ROWS"]))
    x_grad = x.new_empty(x.shape)
    shares = [
        x.new_empty((programs, width), dtype=torch.float32) if needed else None
        for needed in (needs_weight, needs_bias)
    ]
    _norm_backward.launch(
        (programs,),
        *(x, residual, weight.contiguous(), grads[0].contiguous()),
        *(grads[1].contiguous() if len(grads) > 1 else None, x_grad, *shares),
        *(rows, width, x.stride(0), 0 if residual is None else residual.stride(0), eps),
        CENTRED=centred,
        **tile,
    )
    of_weight, of_bias = (s if s is None else sum_rows(s, weight.dtype) for s in shares)
    return x_grad.view(shape), of_weight, of_bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One kernel."""
    return _forward(x, None, weight, None, eps, False)[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """One kernel."""
    return _forward(x, None, weight, bias, eps, True)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """One kernel."""
    return _forward(x, residual, weight, None, eps, False)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """One kernel."""
    return _forward(x, residual, weight, bias, eps, True)


def _backward(residual: bool, centred: bool) -> Backward:
    def backward(needs: list[bool], grads: list[Tensor], *args: Any) -> list[Tensor | None]:
        x, *rest = args
        added = rest.pop(0) if residual else None
        weight, eps = rest[0], args[-1]
        first = 1 + residual
        wants_bias = centred and needs[first + 1]
        of_x, *shared = _gradients(grads, x, added, weight, needs[first], wants_bias, eps, centred)
        return [*([of_x] * first), *shared[: 1 + centred], None]

    return backward


def _fits(x: Tensor, *_: object) -> bool:
    return 0 < x.shape[-1] <= WIDEST and x.numel() > 0


def _example(residual: bool, centred: bool) -> Any:
    def example(make: Meta) -> tuple[Any, ...]:
        x, vector = make(8192, 4096), make(4096)
        return (x, *([x] if residual else []), vector, *([vector] if centred else []), 1e-5)

    return example


for _op, _function, _residual, _centred in (
    (ops.rms_norm, rms_norm, False, False),
    (ops.layer_norm, layer_norm, False, True),
    (ops.add_rms_norm, add_rms_norm, True, False),
    (ops.add_layer_norm, add_layer_norm, True, True),
):
    provide(
        _op,
        _function,
        example=_example(_residual, _centred),
        supports=_fits,
        backward=_backward(_residual, _centred),
    )
