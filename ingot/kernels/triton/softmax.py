"""`softmax` on GPUs: a row in registers; a long row in blocks, read once for its sum and once more
for its result.

Masked and out-of-bounds entries count as -inf.
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
from ingot.kernels.triton.kernel import elementwise_space, kernel
from ingot.kernels.triton.launch import KernelConfig
from ingot.kernels.triton.provider import ExampleInputs, as_rows, provide
from ingot.kernels.triton.target import TargetSpec
from ingot.ops.gradient import Backward

_MAX_BLOCK_N = 8192  # entries of a row that are kept in registers


def _space(target: TargetSpec, BLOCK_M: int, BLOCK_N: int, **_: object) -> Iterator[KernelConfig]:
    yield from elementwise_space(target, BLOCK_M * BLOCK_N)


@triton.jit
def _scores(x, mask, offs_m, offs_n, in_bounds, stride_xm, stride_maskm, stride_maskn, scale):
    """Return the scaled entries of a tile, -inf where masked, and the mask of visible entries."""
    visible = in_bounds
    if mask is not None:
        mask_ptrs = mask + offs_m * stride_maskm + offs_n * stride_maskn
        visible = in_bounds & (tl.load(mask_ptrs, in_bounds, other=0) != 0)
    values = tl.load(x + offs_m * stride_xm + offs_n, in_bounds, other=0.0).to(tl.float32) * scale
    return tl.where(visible, values, float("-inf")), visible


@triton.jit
def online_softmax(scores, row_max, row_sum):
    """Update the running maximum, and the sum of exponentials relative to it, with a tile."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # While all entries are -inf, use 0 instead: -inf - -inf is NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    row_sum = row_sum * tl.exp(row_max - base) + tl.sum(tl.exp(scores - base[:, None]), 1)
    return new_max, row_sum


@triton.jit
def _row_stats(
    x, mask, offs_m, M, N, stride_xm, stride_maskm, stride_maskn, scale,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the maximum and the sum of exponentials of long rows."""
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for start_n in range(0, N, BLOCK_N):
        offs_n = (start_n + tl.arange(0, BLOCK_N))[None, :]
        in_bounds = (offs_m < M) & (offs_n < N)
        scores, _ = _scores(
            x, mask, offs_m, offs_n, in_bounds, stride_xm, stride_maskm, stride_maskn, scale
        )
        row_max, row_sum = online_softmax(scores, row_max, row_sum)
    return tl.where(row_max == float("-inf"), 0.0, row_max), row_sum


@triton.jit
def _normalize(scores, row_max, row_sum, visible, LOG: tl.constexpr):
    if LOG:
        values = scores - row_max[:, None] - tl.log(row_sum)[:, None]
        values = tl.where(visible, values, float("-inf"))
    else:
        values = tl.exp(scores - row_max[:, None]) / row_sum[:, None]
        values = tl.where(visible, values, 0.0)
    return values


@kernel(space=_space, bound_by="bandwidth")
@triton.jit
def _softmax(
    x, mask, y, M, N, stride_xm, stride_maskm, stride_maskn, scale,
    LOG: tl.constexpr, MULTI_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the probabilities, or log-probabilities, of a tile of rows."""
    offs_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    if MULTI_BLOCK:
        row_max, row_sum = _row_stats(
            x, mask, offs_m, M, N, stride_xm, stride_maskm, stride_maskn, scale, BLOCK_M, BLOCK_N
        )
        for start_n in range(0, N, BLOCK_N):
            offs_n = (start_n + tl.arange(0, BLOCK_N))[None, :]
            in_bounds = (offs_m < M) & (offs_n < N)
            scores, visible = _scores(
                x, mask, offs_m, offs_n, in_bounds, stride_xm, stride_maskm, stride_maskn, scale
            )
            values = _normalize(scores, row_max, row_sum, visible, LOG)
            tl.store(y + offs_m * N + offs_n, values.to(y.dtype.element_ty), in_bounds)
    else:
        offs_n = tl.arange(0, BLOCK_N)[None, :]
        in_bounds = (offs_m < M) & (offs_n < N)
        scores, visible = _scores(
            x, mask, offs_m, offs_n, in_bounds, stride_xm, stride_maskm, stride_maskn, scale
        )
        row_max = tl.max(scores, 1)
        base = tl.where(row_max == float("-inf"), 0.0, row_max)
        row_sum = tl.sum(tl.exp(scores - base[:, None]), 1)
        values = _normalize(scores, base, row_sum, visible, LOG)
        tl.store(y + offs_m * N + offs_n, values.to(y.dtype.element_ty), in_bounds)


@triton.jit
def _grad_terms(scores, grad, row_max, row_sum, visible, LOG: tl.constexpr):
    """Return probabilities, masked gradient, and the sum to subtract from the gradient of a row."""
    p = tl.where(visible, tl.exp(scores - row_max[:, None]) / row_sum[:, None], 0.0)
    grad = tl.where(visible, grad, 0.0)
    grad_sum = tl.sum(grad if LOG else grad * p, 1)
    return p, grad, grad_sum


@triton.jit
def _grad_scores(p, grad, grad_sum, scale, visible, LOG: tl.constexpr):
    values = grad - p * grad_sum[:, None] if LOG else p * (grad - grad_sum[:, None])
    return tl.where(visible, values * scale, 0.0)


@kernel(space=_space, bound_by="bandwidth")
@triton.jit
def _softmax_backward(
    x, mask, grad_output, grad_x, M, N, stride_xm, stride_maskm, stride_maskn, scale,
    LOG: tl.constexpr, MULTI_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a tile of rows, recomputing their probabilities."""
    offs_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    if MULTI_BLOCK:
        row_max, row_sum = _row_stats(
            x, mask, offs_m, M, N, stride_xm, stride_maskm, stride_maskn, scale, BLOCK_M, BLOCK_N
        )
        grad_sum = tl.zeros([BLOCK_M], tl.float32)
        for start_n in range(0, N, BLOCK_N):
            offs_n = (start_n + tl.arange(0, BLOCK_N))[None, :]
            in_bounds = (offs_m < M) & (offs_n < N)
            scores, visible = _scores(
                x, mask, offs_m, offs_n, in_bounds, stride_xm, stride_maskm, stride_maskn, scale
            )
            grad = tl.load(grad_output + offs_m * N + offs_n, in_bounds, other=0.0).to(tl.float32)
            _, _, block_sum = _grad_terms(scores, grad, row_max, row_sum, visible, LOG)
            grad_sum += block_sum
        for start_n in range(0, N, BLOCK_N):
            offs_n = (start_n + tl.arange(0, BLOCK_N))[None, :]
            in_bounds = (offs_m < M) & (offs_n < N)
            scores, visible = _scores(
                x, mask, offs_m, offs_n, in_bounds, stride_xm, stride_maskm, stride_maskn, scale
            )
            grad = tl.load(grad_output + offs_m * N + offs_n, in_bounds, other=0.0).to(tl.float32)
            p, grad, _ = _grad_terms(scores, grad, row_max, row_sum, visible, LOG)
            values = _grad_scores(p, grad, grad_sum, scale, visible, LOG)
            tl.store(grad_x + offs_m * N + offs_n, values.to(grad_x.dtype.element_ty), in_bounds)
    else:
        offs_n = tl.arange(0, BLOCK_N)[None, :]
        in_bounds = (offs_m < M) & (offs_n < N)
        scores, visible = _scores(
            x, mask, offs_m, offs_n, in_bounds, stride_xm, stride_maskm, stride_maskn, scale
        )
        grad = tl.load(grad_output + offs_m * N + offs_n, in_bounds, other=0.0).to(tl.float32)
        row_max = tl.max(scores, 1)
        base = tl.where(row_max == float("-inf"), 0.0, row_max)
        row_sum = tl.sum(tl.exp(scores - base[:, None]), 1)
        p, grad, grad_sum = _grad_terms(scores, grad, base, row_sum, visible, LOG)
        values = _grad_scores(p, grad, grad_sum, scale, visible, LOG)
        tl.store(grad_x + offs_m * N + offs_n, values.to(grad_x.dtype.element_ty), in_bounds)


def _block_sizes(N: int) -> dict[str, Any]:
    block_n = min(_MAX_BLOCK_N, triton.next_power_of_2(N))
    return {"MULTI_BLOCK": block_n < N, "BLOCK_M": max(1, 2048 // block_n), "BLOCK_N": block_n}


def _arguments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None, tuple[int, ...]]:
    """Return the rows of x, the rows of the mask, and sizes and strides."""
    if mask is not None:
        mask = mask.expand(x.shape).reshape(-1, x.shape[-1])
    x = as_rows(x)
    strides = (0, 0) if mask is None else mask.stride()
    return x, mask, (*x.shape, x.stride(0), *strides)


def _forward(log: bool) -> Any:
    def forward(x: Tensor, scale: float, mask: Tensor | None) -> Tensor:
        y = x.new_empty(x.shape)
        x, mask, sizes = _arguments(x, mask)
        blocks = _block_sizes(x.shape[1])
        grid = (triton.cdiv(x.shape[0], blocks["BLOCK_M"]),)
        _softmax.launch(grid, x, mask, y, *sizes, scale, LOG=log, **blocks)
        return y

    return forward


def _backward(log: bool) -> Backward:
    def backward(
        needs: list[bool], grads: list[Tensor], x: Tensor, scale: float, mask: Tensor | None
    ) -> list[Tensor | None]:
        grad_x = x.new_empty(x.shape)
        x, mask, sizes = _arguments(x, mask)
        blocks = _block_sizes(x.shape[1])
        grid = (triton.cdiv(x.shape[0], blocks["BLOCK_M"]),)
        grad_output = grads[0].contiguous()
        _softmax_backward.launch(
            grid, x, mask, grad_output, grad_x, *sizes, scale, LOG=log, **blocks
        )
        return [grad_x, None, None]

    return backward


def _supported(x: Tensor, *_: object) -> bool:
    return x.numel() > 0


def _example(make: ExampleInputs) -> tuple[Any, ...]:
    return make(8192, 4096), 1.0, None


for _op, _log in ((ops.softmax, False), (ops.log_softmax, True)):
    provide(_op, _forward(_log), example=_example, supports=_supported, backward=_backward(_log))
