"""`softmax` on GPUs: a row in registers; a long one in pieces, read once for its sum, once more for
its result.

An entry that is masked counts as -inf, and so does what lies beyond a row's end.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ingot import ops
from ingot.kernels.triton.kernel import Config, by_elements, kernel
from ingot.kernels.triton.provider import Meta, as_rows, provide
from ingot.kernels.triton.target import Target
from ingot.ops.gradient import Backward

_WIDEST = 8192  # entries of a row that are in registers at a time


def _space(target: Target, ROWS: int, WIDTH: int, **_: object) -> Iterator[Config]:
    yield from by_elements(target, ROWS * WIDTH)


@triton.jit
def _scores(x, mask, row, column, inside, x_row, mask_row, mask_column, scale):
    """Scaled entries of a tile, -inf where they take no part, and where they do."""
    taking_part = inside
    if mask is not None:
        at = mask + row * mask_row + column * mask_column
        taking_part = inside & (tl.load(at, inside, other=0) != 0)
    values = tl.load(x + row * x_row + column, inside, other=0.0).to(tl.float32) * scale
    return tl.where(taking_part, values, float("-inf")), taking_part


@triton.jit
def online(scores, largest, total):
    """The largest entry and the sum of exponentials relative to it, with one more tile."""
    now = tl.maximum(largest, tl.max(scores, 1))
    # Where all were -inf so far, nothing is relative to it: -inf - -inf is not a number.
    base = tl.where(now == float("-inf"), 0.0, now)
    total = total * tl.exp(largest - base) + tl.sum(tl.exp(scores - base[:, None]), 1)
    return now, total


@triton.jit
def _row_sums(
    x, mask, row, rows, width, x_row, mask_row, mask_column, scale,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Largest entry and sum of exponentials of long rows."""
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for first in range(0, width, WIDTH):
        column = (first + tl.arange(0, WIDTH))[None, :]
        inside = (row < rows) & (column < width)
        scores, _ = _scores(x, mask, row, column, inside, x_row, mask_row, mask_column, scale)
        largest, total = online(scores, largest, total)
    return tl.where(largest == float("-inf"), 0.0, largest), total


@triton.jit
def _result(scores, largest, total, taking_part, LOG: tl.constexpr):
    if LOG:
        values = scores - largest[:, None] - tl.log(total)[:, None]
        values = tl.where(taking_part, values, float("-inf"))
    else:
        values = tl.exp(scores - largest[:, None]) / total[:, None]
        values = tl.where(taking_part, values, 0.0)
    return values


@kernel(space=_space, bound="bandwidth")
@triton.jit
def _softmax(
    x, mask, y, rows, width, x_row, mask_row, mask_column, scale,
    LOG: tl.constexpr, LONG: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Probabilities, or their logarithms, of a tile of rows."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    if LONG:
        largest, total = _row_sums(
            x, mask, row, rows, width, x_row, mask_row, mask_column, scale, ROWS, WIDTH
        )
        for first in range(0, width, WIDTH):
            column = (first + tl.arange(0, WIDTH))[None, :]
            inside = (row < rows) & (column < width)
            scores, part = _scores(
                x, mask, row, column, inside, x_row, mask_row, mask_column, scale
            )
            values = _result(scores, largest, total, part, LOG)
            tl.store(y + row * width + column, values.to(y.dtype.element_ty), inside)
    else:
        column = tl.arange(0, WIDTH)[None, :]
        inside = (row < rows) & (column < width)
        scores, part = _scores(x, mask, row, column, inside, x_row, mask_row, mask_column, scale)
        highest = tl.max(scores, 1)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        sums = tl.sum(tl.exp(scores - base[:, None]), 1)
        values = _result(scores, base, sums, part, LOG)
        tl.store(y + row * width + column, values.to(y.dtype.element_ty), inside)


@triton.jit
def _inner(scores, given, largest, total, part, LOG: tl.constexpr):
    """The probabilities, and what the gradient of a row has to be cleared of."""
    p = tl.where(part, tl.exp(scores - largest[:, None]) / total[:, None], 0.0)
    given = tl.where(part, given, 0.0)
    common = tl.sum(given if LOG else given * p, 1)
    return p, given, common


@triton.jit
def _of_scores(p, given, common, scale, part, LOG: tl.constexpr):
    values = given - p * common[:, None] if LOG else p * (given - common[:, None])
    return tl.where(part, values * scale, 0.0)


@kernel(space=_space, bound="bandwidth")
@triton.jit
def _softmax_backward(
    x, mask, grad, x_grad, rows, width, x_row, mask_row, mask_column, scale,
    LOG: tl.constexpr, LONG: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of rows; their probabilities are computed again."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    if LONG:
        largest, total = _row_sums(
            x, mask, row, rows, width, x_row, mask_row, mask_column, scale, ROWS, WIDTH
        )
        common = tl.zeros([ROWS], tl.float32)
        for first in range(0, width, WIDTH):
            column = (first + tl.arange(0, WIDTH))[None, :]
            inside = (row < rows) & (column < width)
            scores, part = _scores(
                x, mask, row, column, inside, x_row, mask_row, mask_column, scale
            )
            given = tl.load(grad + row * width + column, inside, other=0.0).to(tl.float32)
            _, _, more = _inner(scores, given, largest, total, part, LOG)
            common += more
        for first in range(0, width, WIDTH):
            column = (first + tl.arange(0, WIDTH))[None, :]
            inside = (row < rows) & (column < width)
            scores, part = _scores(
                x, mask, row, column, inside, x_row, mask_row, mask_column, scale
            )
            given = tl.load(grad + row * width + column, inside, other=0.0).to(tl.float32)
            p, given, _ = _inner(scores, given, largest, total, part, LOG)
            values = _of_scores(p, given, common, scale, part, LOG)
            tl.store(x_grad + row * width + column, values.to(x_grad.dtype.element_ty), inside)
    else:
        column = tl.arange(0, WIDTH)[None, :]
        inside = (row < rows) & (column < width)
        scores, part = _scores(x, mask, row, column, inside, x_row, mask_row, mask_column, scale)
        given = tl.load(grad + row * width + column, inside, other=0.0).to(tl.float32)
        highest = tl.max(scores, 1)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        sums = tl.sum(tl.exp(scores - base[:, None]), 1)
        p, given, shared = _inner(scores, given, base, sums, part, LOG)
        values = _of_scores(p, given, shared, scale, part, LOG)
        tl.store(x_grad + row * width + column, values.to(x_grad.dtype.element_ty), inside)


def _tile(width: int) -> dict[str, Any]:
    padded = min(_WIDEST, triton.next_power_of_2(width))
    return {"LONG": width > padded, "ROWS": max(1, 2048 // padded), "WIDTH": padded}


def _arguments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, tuple[int, ...]]:
    """Rows, the mask's rows, and sizes and strides."""
    if mask is not None:
        mask = mask.expand(x.shape).reshape(-1, x.shape[-1])
    x = as_rows(x)
    strides = (0, 0) if mask is None else mask.stride()
    return x, mask, (*x.shape, x.stride(0), *strides)


def _forward(log: bool) -> Any:
    def forward(x: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        y = x.new_empty(x.shape)
        x, mask, sizes = _arguments(x, mask)
        tile = _tile(x.shape[1])
        grid = (triton.cdiv(x.shape[0], tile["ROWS"]),)
        _softmax.launch(grid, x, mask, y, *sizes, scale, LOG=log, **tile)
        return y

    return forward


def _backward(log: bool) -> Backward:
    def backward(
        needs: list[bool], grads: list[Tensor], x: Tensor, scale: float, mask: Tensor | None
    ) -> list[Tensor | None]:
        x_grad = x.new_empty(x.shape)
        x, mask, sizes = _arguments(x, mask)
        tile = _tile(x.shape[1])
        grid = (triton.cdiv(x.shape[0], tile["ROWS"]),)
        grad = grads[0].contiguous()
        _softmax_backward.launch(grid, x, mask, grad, x_grad, *sizes, scale, LOG=log, **tile)
        return [x_grad, None, None]

    return backward


def _fits(x: Tensor, *_: object) -> bool:
    return x.numel() > 0


def _example(make: Meta) -> tuple[Any, ...]:
    return make(8192, 4096), 1.0, None


for _op, _log in ((ops.softmax, False), (ops.log_softmax, True)):
    provide(_op, _forward(_log), example=_example, supports=_fits, backward=_backward(_log))
