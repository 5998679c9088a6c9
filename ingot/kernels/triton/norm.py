"""`norm` on GPUs: a row, or several short ones, in the registers of a program.

The forward pass reads each row once, and the weight once per program: at most `MAX_PARTIALS`
programs loop over the rows with the weight in registers, while the next rows are being loaded. The
backward pass recomputes the row statistics instead of storing them, and accumulates the gradients
of weight and bias over its rows in registers; `reduce.py` sums these partial gradients.
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
from ingot.kernels.triton.kernel import elementwise_space, kernel
from ingot.kernels.triton.launch import KernelConfig
from ingot.kernels.triton.provider import ExampleInputs, as_rows, provide
from ingot.kernels.triton.reduce import MAX_PARTIALS, sum_rows
from ingot.kernels.triton.target import TargetSpec
from ingot.ops.gradient import Backward

MAX_WIDTH = 16384  # channels that fit in the registers of a program
_BLOCK_ELEMENTS = 2048  # elements of a block of short rows


def _space(target: TargetSpec, BLOCK_M: int, BLOCK_D: int, **_: object) -> Iterator[KernelConfig]:
    yield from elementwise_space(target, BLOCK_M * BLOCK_D)


def _forward_space(
    target: TargetSpec, BLOCK_M: int, BLOCK_D: int, **_: object
) -> Iterator[KernelConfig]:
    for config in elementwise_space(target, BLOCK_M * BLOCK_D):
        for loop_stages in (3, 1):
            yield KernelConfig.of(config.num_warps, LOOP_STAGES=loop_stages)


@triton.jit
def _statistics(x, mask, D, eps, CENTERED: tl.constexpr):
    """Return the rows, centered if `CENTERED`, and the reciprocal of their standard deviation."""
    centered = x
    if CENTERED:
        mean = tl.sum(x, 1) / D
        centered = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, 1) / D + eps)
    return centered, rstd


@kernel(space=_forward_space, bound_by="bandwidth")
@triton.jit
def _norm(
    x, residual, weight, bias, y, residual_out, M, D, stride_xm, stride_rm, eps,
    CENTERED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, LOOP_STAGES: tl.constexpr,
):  # fmt: skip
    """Grid-stride loop over row blocks: normalize x, or x plus the residual, which is then stored
    too. While a block is computed, the next LOOP_STAGES - 1 are being loaded."""
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    w = tl.load(weight + offs_d, offs_d < D, other=0.0)
    b = w
    if bias is not None:
        b = tl.load(bias + offs_d, offs_d < D, other=0.0)
    first_m, step_m = tl.program_id(0) * BLOCK_M, tl.num_programs(0) * BLOCK_M
    for start_m in tl.range(first_m, M, step_m, num_stages=LOOP_STAGES):
        offs_m = (start_m + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        mask = (offs_m < M) & (offs_d < D)
        x_tile = tl.load(x + offs_m * stride_xm + offs_d, mask, other=0.0).to(tl.float32)
        if residual is not None:
            residual_tile = tl.load(residual + offs_m * stride_rm + offs_d, mask, other=0.0)
            x_tile += residual_tile.to(tl.float32)
            tl.store(
                residual_out + offs_m * D + offs_d, x_tile.to(residual_out.dtype.element_ty), mask
            )
        centered, rstd = _statistics(x_tile, mask, D, eps, CENTERED)
        y_tile = centered * rstd[:, None] * w.to(tl.float32)
        if bias is not None:
            y_tile += b.to(tl.float32)
        tl.store(y + offs_m * D + offs_d, y_tile.to(y.dtype.element_ty), mask)


@kernel(space=_space, bound_by="bandwidth")
@triton.jit
def _norm_backward(
    x, residual, weight, grad_output, grad_residual_out, grad_x, grad_weight, grad_bias,
    M, D, stride_xm, stride_rm, eps,
    CENTERED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid-stride loop over row blocks: the gradient of x, and partial ones of weight and bias."""
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    w = tl.load(weight + offs_d, offs_d < D, other=0.0).to(tl.float32)
    grad_weight_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    grad_bias_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start_m in range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M):
        offs_m = (start_m + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        mask = (offs_m < M) & (offs_d < D)
        x_tile = tl.load(x + offs_m * stride_xm + offs_d, mask, other=0.0).to(tl.float32)
        if residual is not None:
            x_tile += tl.load(residual + offs_m * stride_rm + offs_d, mask, other=0.0).to(
                tl.float32
            )
        grad = tl.load(grad_output + offs_m * D + offs_d, mask, other=0.0).to(tl.float32)
        centered, rstd = _statistics(x_tile, mask, D, eps, CENTERED)
        x_hat = centered * rstd[:, None]
        if grad_weight is not None:
            grad_weight_acc += grad * x_hat
        if grad_bias is not None:
            grad_bias_acc += grad
        grad_x_hat = grad * w
        grad_centered = grad_x_hat - x_hat * (tl.sum(grad_x_hat * x_hat, 1) / D)[:, None]
        if CENTERED:
            grad_centered -= (tl.sum(grad_x_hat, 1) / D)[:, None]
        grad_tile = grad_centered * rstd[:, None]
        if grad_residual_out is not None:
            grad_tile += tl.load(grad_residual_out + offs_m * D + offs_d, mask, other=0.0).to(
                tl.float32
            )
        tl.store(grad_x + offs_m * D + offs_d, grad_tile.to(grad_x.dtype.element_ty), mask)
    offs = tl.program_id(0) * D + tl.arange(0, BLOCK_D)
    mask_d = tl.arange(0, BLOCK_D) < D
    if grad_weight is not None:
        tl.store(grad_weight + offs, tl.sum(grad_weight_acc, 0), mask_d)
    if grad_bias is not None:
        tl.store(grad_bias + offs, tl.sum(grad_bias_acc, 0), mask_d)


def _block_sizes(width: int) -> dict[str, int]:
    block_d = triton.next_power_of_2(width)
    return {"BLOCK_M": max(1, _BLOCK_ELEMENTS // block_d), "BLOCK_D": block_d}


def _forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
) -> tuple[Tensor, Tensor]:
    shape, x = x.shape, as_rows(x)
    residual = residual if residual is None else as_rows(residual)
    y = x.new_empty(x.shape)
    residual_out = y if residual is None else x.new_empty(x.shape)
    M, D = x.shape
    blocks = _block_sizes(D)
    stride_rm = 0 if residual is None else residual.stride(0)
    _norm.launch(
        (min(MAX_PARTIALS, triton.cdiv(M, blocks["BLOCK_M"])),),
        *(
            x,
            residual,
            weight.contiguous(),
            bias if bias is None else bias.contiguous(),
            y,
            residual_out,
        ),
        *(M, D, x.stride(0), stride_rm, eps),
        CENTERED=centered,
        **blocks,
    )
    return y.view(shape), residual_out.view(shape)


def _grads(
    grads: list[Tensor],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    needs_weight: bool,
    needs_bias: bool,
    eps: float,
    centered: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of x, weight and bias."""
    shape, x = x.shape, as_rows(x)
    residual = residual if residual is None else as_rows(residual)
    M, D = x.shape
    blocks = _block_sizes(D)
    num_partials = min(MAX_PARTIALS, triton.cdiv(M, blocks["BLOCK_M"]))
    grad_x = x.new_empty(x.shape)
    partials = [
        x.new_empty((num_partials, D), dtype=torch.float32) if needed else None
        for needed in (needs_weight, needs_bias)
    ]
    _norm_backward.launch(
        (num_partials,),
        *(x, residual, weight.contiguous(), grads[0].contiguous()),
        *(grads[1].contiguous() if len(grads) > 1 else None, grad_x, *partials),
        *(M, D, x.stride(0), 0 if residual is None else residual.stride(0), eps),
        CENTERED=centered,
        **blocks,
    )
    grad_weight, grad_bias = (
        partial if partial is None else sum_rows(partial, weight.dtype) for partial in partials
    )
    return grad_x.view(shape), grad_weight, grad_bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launch one kernel."""
    return _forward(x, None, weight, None, eps, False)[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Launch one kernel."""
    return _forward(x, None, weight, bias, eps, True)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Launch one kernel."""
    return _forward(x, residual, weight, None, eps, False)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Launch one kernel."""
    return _forward(x, residual, weight, bias, eps, True)


def _backward(residual: bool, centered: bool) -> Backward:
    def backward(needs: list[bool], grads: list[Tensor], *args: Any) -> list[Tensor | None]:
        x, *rest = args
        residual_input = rest.pop(0) if residual else None
        weight, eps = rest[0], args[-1]
        num_x_inputs = 1 + residual
        needs_bias = centered and needs[num_x_inputs + 1]
        grad_x, *param_grads = _grads(
            grads, x, residual_input, weight, needs[num_x_inputs], needs_bias, eps, centered
        )
        return [*([grad_x] * num_x_inputs), *param_grads[: 1 + centered], None]

    return backward


def _supported(x: Tensor, *_: object) -> bool:
    return 0 < x.shape[-1] <= MAX_WIDTH and x.numel() > 0


def _example(residual: bool, centered: bool) -> Any:
    def example(make: ExampleInputs) -> tuple[Any, ...]:
        x, vector = make(8192, 4096), make(4096)
        return (x, *([x] if residual else []), vector, *([vector] if centered else []), 1e-5)

    return example


for _op, _function, _residual, _centered in (
    (ops.rms_norm, rms_norm, False, False),
    (ops.layer_norm, layer_norm, False, True),
    (ops.add_rms_norm, add_rms_norm, True, False),
    (ops.add_layer_norm, add_layer_norm, True, True),
):
    provide(
        _op,
        _function,
        example=_example(_residual, _centered),
        supports=_supported,
        backward=_backward(_residual, _centered),
    )
