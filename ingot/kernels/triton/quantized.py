"""`quantized` on GPUs: weights stay quantized in memory and are dequantized in registers.

int8 weights convert to floating point exactly, so their per-channel scale is applied to the
accumulator in float32. int4 weights have a scale per group: they are scaled in float32 and rounded
once to the dtype of x. `BLOCK_K` never spans two groups.

The gradient of x is a GEMM with the same weight, read row by row. The scales lie along its
reduction dimension, so they are applied before the dot. Gradients of the scales fall back to the
reference.

For dynamic quantization, one kernel quantizes the rows of x and another multiplies int8 by int8
with int32 accumulation. As in `linear.py`, K is not split and block sizes do not depend on M.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ingot import ops
from ingot.kernels.triton.kernel import elementwise_space, kernel
from ingot.kernels.triton.launch import KernelConfig
from ingot.kernels.triton.linear import GROUP_M, gemm_space, input_precision, itemsize, swizzle
from ingot.kernels.triton.provider import ExampleInputs, as_rows, provide
from ingot.kernels.triton.reduce import sum_rows
from ingot.kernels.triton.target import TargetSpec
from ingot.ops.epilogue import ActivationFn
from ingot.ops.gradient import Backward, differentiate
from ingot.ops.record import Op

_MAX_BLOCK = 4096  # channels quantized at a time
_MIN_ABS_MAX = tl.constexpr(2.0**-100)  # as in the reference
_ROUND_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds to integers

# BLOCK_M, BLOCK_N, warps, stages.
_TILES = ((64, 128, 8, 3), (128, 128, 8, 3), (64, 64, 4, 3), (32, 128, 4, 4), (16, 128, 4, 4))


def _dequant_space(
    target: TargetSpec, INPUT_PRECISION: str, GROUP_SIZE: int = 64, **_: object
) -> Iterator[KernelConfig]:
    """Yield tiles whose operands (x and dequantized weight) fit in shared memory."""
    block_k = 32 if INPUT_PRECISION == "ieee" else min(64, GROUP_SIZE)
    for block_m, block_n, num_warps, num_stages in _TILES:
        if INPUT_PRECISION == "ieee":
            block_m, block_n, num_stages = min(block_m, 64), min(block_n, 64), 2
        num_stages = min(num_stages, 2) if target.backend == "hip" else num_stages
        shared_bytes = (block_m + block_n) * block_k * itemsize(INPUT_PRECISION) * num_stages
        if shared_bytes <= target.max_shared_bytes:
            yield KernelConfig.of(
                num_warps, num_stages, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k
            )


def _backward_space(
    target: TargetSpec, INPUT_PRECISION: str, GROUP_SIZE: int, **_: object
) -> Iterator[KernelConfig]:
    """Yield tiles that do not span two quantization groups."""
    block_k, block_n = (32, 64) if INPUT_PRECISION == "ieee" else (64, 128)
    block_n = min(block_n, GROUP_SIZE or block_n)
    for block_m, num_warps, num_stages in ((64, 8, 3), (128, 8, 3), (64, 4, 2)):
        num_stages = min(num_stages, 2) if target.backend == "hip" else num_stages
        block_m = min(block_m, 64) if INPUT_PRECISION == "ieee" else block_m
        shared_bytes = (block_m + block_n) * block_k * itemsize(INPUT_PRECISION) * num_stages
        if shared_bytes <= target.max_shared_bytes:
            yield KernelConfig.of(
                num_warps, num_stages, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k
            )


def _integer_space(target: TargetSpec, **_: object) -> Iterator[KernelConfig]:
    """Yield the half-precision tiles with twice the BLOCK_K: the same number of bytes."""
    for config in gemm_space(target, 2):
        constants = dict(config.constants)
        constants["BLOCK_K"] *= 2
        yield KernelConfig.of(config.num_warps, config.num_stages, **constants)


def _row_space(target: TargetSpec, BLOCK: int, **_: object) -> Iterator[KernelConfig]:
    yield from elementwise_space(target, BLOCK)


@triton.jit
def _tile_offsets(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return the row and column offsets of this program."""
    m_tile, n_tile = swizzle(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    offs_m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return offs_m, n_tile * BLOCK_N + tl.arange(0, BLOCK_N)


@triton.jit
def _store(acc, bias, y, offs_m, offs_n, M, N):
    """Add the bias to a float32 accumulator and store it."""
    if bias is not None:
        acc += tl.load(bias + offs_n, offs_n < N, other=0.0).to(tl.float32)[None, :]
    offs = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(y + offs, acc.to(y.dtype.element_ty), mask)


@kernel(space=_dequant_space, bound_by="tensor cores")
@triton.jit
def _linear_int8(
    x, w, scale, bias, y, M, N, K, stride_xm, stride_wn,
    EVEN_K: tl.constexpr, INPUT_PRECISION: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the GEMM with an int8 weight."""
    offs_m, offs_n = _tile_offsets(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x + offs_m.to(tl.int64)[:, None] * stride_xm + offs_k[None, :]
    w_ptrs = w + offs_n.to(tl.int64)[:, None] * stride_wn + offs_k[None, :]
    mask_m, mask_n = (offs_m < M)[:, None], (offs_n < N)[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in range(0, K, BLOCK_K):
        if EVEN_K:
            b_int8 = tl.load(w_ptrs, mask_n, other=0)
            a = tl.load(x_ptrs, mask_m, other=0.0)
        else:
            mask_k = offs_k < K - start_k
            b_int8 = tl.load(w_ptrs, mask_n & mask_k[None, :], other=0)
            a = tl.load(x_ptrs, mask_m & mask_k[None, :], other=0.0)
        b = tl.trans(b_int8.to(x.dtype.element_ty))
        acc = tl.dot(a, b, acc, input_precision=INPUT_PRECISION)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    acc *= tl.load(scale + offs_n, offs_n < N, other=0.0).to(tl.float32)[None, :]
    _store(acc, bias, y, offs_m, offs_n, M, N)


@kernel(space=_dequant_space, bound_by="tensor cores")
@triton.jit
def _linear_int4(
    x, w, scale, zero, bias, y, M, N, K, stride_xm, stride_wn, stride_sn,
    GROUP_SIZE: tl.constexpr, INPUT_PRECISION: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the GEMM with an int4 weight in groups of `GROUP_SIZE` channels."""
    offs_m, offs_n = _tile_offsets(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_byte = tl.arange(0, BLOCK_K // 2)
    x_ptrs = x + offs_m.to(tl.int64)[:, None] * stride_xm + tl.arange(0, BLOCK_K)[None, :]
    w_ptrs = w + offs_n.to(tl.int64)[:, None] * stride_wn + offs_byte[None, :]
    scale_offs = offs_n.to(tl.int64) * stride_sn
    mask_n = offs_n < N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in range(0, K, BLOCK_K):
        group = start_k // GROUP_SIZE
        packed = tl.load(w_ptrs, mask_n[:, None], other=0)
        a = tl.load(x_ptrs, (offs_m < M)[:, None], other=0.0)
        group_scale = tl.load(scale + scale_offs + group, mask_n, other=0.0).to(tl.float32)
        zero_point = 8.0
        if zero is not None:
            zero_point = tl.load(zero + scale_offs + group, mask_n, other=0.0)
            zero_point = zero_point.to(tl.float32)[:, None]
        low = ((packed & 15).to(tl.float32) - zero_point) * group_scale[:, None]
        high = ((packed >> 4).to(tl.float32) - zero_point) * group_scale[:, None]
        b_halves = tl.join(low.to(x.dtype.element_ty), high.to(x.dtype.element_ty))
        b = tl.reshape(b_halves, [BLOCK_N, BLOCK_K])
        acc = tl.dot(a, tl.trans(b), acc, input_precision=INPUT_PRECISION)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K // 2
    _store(acc, bias, y, offs_m, offs_n, M, N)


@kernel(space=_backward_space, bound_by="tensor cores")
@triton.jit
def _linear_quantized_backward(
    grad_output, w, scale, zero, grad_x, M, N, K, stride_gm, stride_wk, stride_sk,
    GROUP_SIZE: tl.constexpr, EVEN_K: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the gradient of x; `GROUP_SIZE` is 0 for int8 weights."""
    m_tile, n_tile = swizzle(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    offs_m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    grad_ptrs = grad_output + offs_m.to(tl.int64)[:, None] * stride_gm + offs_k[None, :]
    scale_offs = offs_k.to(tl.int64) * stride_sk
    if GROUP_SIZE:
        scale_offs += n_tile * BLOCK_N // GROUP_SIZE
        offs_byte = n_tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        w_ptrs = w + offs_k.to(tl.int64)[:, None] * stride_wk + offs_byte[None, :]
        mask_n = tl.full([BLOCK_N // 2], True, tl.int1)[None, :]
    else:
        w_ptrs = w + offs_k.to(tl.int64)[:, None] * stride_wk + offs_n[None, :]
        mask_n = (offs_n < N)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in range(0, K, BLOCK_K):
        mask_k = offs_k < K - start_k
        if EVEN_K:
            mask_k = offs_k < BLOCK_K
        a = tl.load(grad_ptrs, (offs_m < M)[:, None] & mask_k[None, :], other=0.0)
        b_packed = tl.load(w_ptrs, mask_n & mask_k[:, None], other=0)
        row_scale = tl.load(scale + scale_offs, mask_k, other=0.0).to(tl.float32)[:, None]
        if GROUP_SIZE:
            zero_point = 8.0
            if zero is not None:
                zero_point = tl.load(zero + scale_offs, mask_k, other=0.0).to(tl.float32)[:, None]
            low = ((b_packed & 15).to(tl.float32) - zero_point) * row_scale
            high = ((b_packed >> 4).to(tl.float32) - zero_point) * row_scale
            b_halves = tl.join(
                low.to(grad_output.dtype.element_ty), high.to(grad_output.dtype.element_ty)
            )
            b = tl.reshape(b_halves, [BLOCK_K, BLOCK_N])
        else:
            b = (b_packed.to(tl.float32) * row_scale).to(grad_output.dtype.element_ty)
        acc = tl.dot(a, b, acc, input_precision=INPUT_PRECISION)
        grad_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * stride_wk
        scale_offs += BLOCK_K * stride_sk
    _store(acc, None, grad_x, offs_m, offs_n, M, N)


@triton.jit
def _abs_max(x):
    """Return the maximum magnitude; inf if there is a NaN."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 0)


@kernel(space=_row_space, bound_by="bandwidth")
@triton.jit
def _quantize_rows(x, q, scales, K, stride_xm, SINGLE_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """Quantize a row to int8 and store its scale; a row longer than BLOCK is read twice."""
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride_xm + offs_k, offs_k < K, other=0.0).to(tl.float32)
    abs_max = _abs_max(values)
    if not SINGLE_BLOCK:
        for start_k in range(BLOCK, K, BLOCK):
            offs = start_k + offs_k
            tail = tl.load(x + row * stride_xm + offs, offs < K, other=0.0).to(tl.float32)
            abs_max = tl.maximum(abs_max, _abs_max(tail))
    row_scale = tl.div_rn(tl.maximum(abs_max, _MIN_ABS_MAX), 127.0)
    tl.store(scales + row, row_scale)
    # Division, not multiplication by the inverse: a product could be contracted with the addition
    # into an FMA, and then ties would not round to even.
    rounded = (tl.div_rn(values, row_scale) + _ROUND_MAGIC) - _ROUND_MAGIC
    tl.store(q + row * K + offs_k, rounded.to(tl.int8), offs_k < K)
    if not SINGLE_BLOCK:
        for start_k in range(BLOCK, K, BLOCK):
            offs = start_k + offs_k
            tail = tl.load(x + row * stride_xm + offs, offs < K, other=0.0).to(tl.float32)
            rounded = (tl.div_rn(tail, row_scale) + _ROUND_MAGIC) - _ROUND_MAGIC
            tl.store(q + row * K + offs, rounded.to(tl.int8), offs < K)


@kernel(space=_integer_space, bound_by="tensor cores")
@triton.jit
def _linear_int8_dynamic(
    q, w, x_scales, scale, bias, y, M, N, K, stride_wn,
    EVEN_K: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the int8 GEMM and apply both scales."""
    offs_m, offs_n = _tile_offsets(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    offs_k = tl.arange(0, BLOCK_K)
    q_ptrs = q + offs_m.to(tl.int64)[:, None] * K + offs_k[None, :]
    w_ptrs = w + offs_n.to(tl.int64)[None, :] * stride_wn + offs_k[:, None]
    mask_m, mask_n = (offs_m < M)[:, None], (offs_n < N)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for start_k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(q_ptrs, mask_m, other=0)
            b = tl.load(w_ptrs, mask_n, other=0)
        else:
            mask_k = offs_k < K - start_k
            a = tl.load(q_ptrs, mask_m & mask_k[None, :], other=0)
            b = tl.load(w_ptrs, mask_n & mask_k[:, None], other=0)
        acc = tl.dot(a, b, acc, out_dtype=tl.int32)
        q_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    result = acc.to(tl.float32) * tl.load(x_scales + offs_m, offs_m < M, other=0.0)[:, None]
    result *= tl.load(scale + offs_n, offs_n < N, other=0.0).to(tl.float32)[None, :]
    _store(result, bias, y, offs_m, offs_n, M, N)


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


_ACTIVATIONS: dict[int, Callable[[Tensor], Tensor]] = {
    ActivationFn.GELU: ops.gelu,
    ActivationFn.GELU_TANH: ops.gelu_tanh,
    ActivationFn.SILU: ops.silu,
    ActivationFn.RELU: torch.relu,
}


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _grid(M: int, N: int) -> Any:
    def grid(constants: dict[str, Any]) -> tuple[int]:
        num_m_tiles = triton.cdiv(M, constants["BLOCK_M"])
        return (num_m_tiles * triton.cdiv(N, constants["BLOCK_N"]),)

    return grid


def _apply_epilogue(y: Tensor, activation: int, residual: Tensor | None) -> Tensor:
    """Apply what is not fused into these kernels yet: the activation and the residual."""
    if activation != ActivationFn.IDENTITY:
        y = _ACTIVATIONS[activation](y)
    return y if residual is None else residual + y


def linear_int8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
) -> Tensor:
    """Launch one kernel for the GEMM and its bias, then the rest of the epilogue."""
    rows, weight = as_rows(x), _with_unit_stride(weight)
    (M, K), N = rows.shape, len(weight)
    y = x.new_empty((*x.shape[:-1], N))
    _linear_int8.launch(
        _grid(M, N),
        *(rows, weight, scale.contiguous(), _contiguous(bias), y, M, N, K),
        *(rows.stride(0), weight.stride(0)),
        EVEN_K=K % 64 == 0,
        INPUT_PRECISION=input_precision(x.dtype),
        GROUP_M=GROUP_M,
        shape=(N, K),
    )
    return _apply_epilogue(y, activation, residual)


def linear_int4(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
) -> Tensor:
    """Launch one kernel for the GEMM and its bias, then the rest of the epilogue."""
    rows, weight, scale = as_rows(x), _with_unit_stride(weight), scale.contiguous()
    (M, K), N = rows.shape, len(weight)
    y = x.new_empty((*x.shape[:-1], N))
    _linear_int4.launch(
        _grid(M, N),
        *(rows, weight, scale, _contiguous(zero), _contiguous(bias), y, M, N, K),
        *(rows.stride(0), weight.stride(0), scale.stride(0)),
        GROUP_SIZE=K // scale.shape[1],
        INPUT_PRECISION=input_precision(x.dtype),
        GROUP_M=GROUP_M,
        shape=(N, K),
    )
    return _apply_epilogue(y, activation, residual)


def _grad_x(
    grad_output: Tensor, x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None
) -> Tensor:
    """Return the gradient of x; a per-group scale is (out, groups)."""
    weight, scale = _with_unit_stride(weight), scale.contiguous()
    (M, K), N = grad_output.shape, x.shape[-1]
    grad_x = x.new_empty(x.shape)
    _linear_quantized_backward.launch(
        _grid(M, N),
        *(grad_output, weight, scale, _contiguous(zero), grad_x, M, N, K),
        *(grad_output.stride(0), weight.stride(0), scale.stride(0)),
        GROUP_SIZE=N // scale.shape[1] if scale.dim() == 2 else 0,
        EVEN_K=K % 64 == 0,
        INPUT_PRECISION=input_precision(x.dtype),
        GROUP_M=GROUP_M,
        shape=(N, K),
    )
    return grad_x


def _backward(op: Op[..., Any]) -> Backward:
    """Build the backward: a kernel for x, a sum for the bias, the reference for the rest.

    With an activation, all gradients are those of the reference.
    """
    reference = differentiate(op.fallback)

    def backward(needs: list[bool], grads: list[Tensor], *args: Any) -> list[Tensor | None]:
        x, weight, scale, *zero, _, activation, _ = args
        if activation != ActivationFn.IDENTITY:
            return list(reference(needs, grads, *args))
        grad_output = as_rows(grads[0])
        input_grads: list[Tensor | None] = [None] * len(args)
        reference_needs = [False, False, *needs[2:-3], False, False, False]
        if any(reference_needs):
            input_grads = list(reference(reference_needs, grads, *args))
        if needs[0]:
            input_grads[0] = _grad_x(grad_output, x, weight, scale, *(zero or [None]))
        if needs[-3]:
            input_grads[-3] = sum_rows(grad_output, grad_output.dtype)
        if needs[-1]:
            input_grads[-1] = grads[0]
        return input_grads

    return backward


def linear_int8_dynamic(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
    *_: object,
) -> Tensor:
    """Launch two kernels, for the quantization of x and the GEMM, then the rest of the epilogue."""
    rows, weight = as_rows(x), _with_unit_stride(weight)
    (M, K), N = rows.shape, len(weight)
    q = x.new_empty((M, K), dtype=torch.int8)
    x_scales = x.new_empty((M,), dtype=torch.float32)
    block = min(_MAX_BLOCK, triton.next_power_of_2(K))
    _quantize_rows.launch(
        *((M,), rows, q, x_scales, K, rows.stride(0)), SINGLE_BLOCK=block >= K, BLOCK=block
    )
    y = x.new_empty((*x.shape[:-1], N))
    _linear_int8_dynamic.launch(
        _grid(M, N),
        *(q, weight, x_scales, scale.contiguous(), _contiguous(bias), y, M, N, K),
        weight.stride(0),
        EVEN_K=K % 128 == 0,
        GROUP_M=GROUP_M,
        shape=(N, K),
    )
    return _apply_epilogue(y, activation, residual)


def _supported(x: Tensor, weight: Tensor, *_: object) -> bool:
    return x.numel() > 0 and weight.numel() > 0


def _supports_dynamic(x: Tensor, weight: Tensor, scale: Tensor, *args: Any) -> bool:
    """Return whether rows of x have one scale and the epilogue is that of the other ops."""
    x_group, gated, lora_h, _, _, to_float32 = args[3:]
    plain = not (x_group or gated or to_float32) and lora_h is None
    return _supported(x, weight) and plain and scale.dim() == 1 and weight.dim() == 2


def _int8_example(make: ExampleInputs) -> tuple[Any, ...]:
    weight = make.ints(4096, 4096, dtype=torch.int8)
    return make(4096, 4096), weight, make(4096, dtype=torch.float32), make(4096)


def _int4_example(make: ExampleInputs, group_size: int = 128) -> tuple[Any, ...]:
    weight = make.ints(4096, 2048, dtype=torch.uint8)
    scale = make(4096, 4096 // group_size)
    return make(4096, 4096), weight, scale, scale, make(4096)


def _int4_small_group_example(make: ExampleInputs) -> tuple[Any, ...]:
    return _int4_example(make, 32)


provide(
    ops.linear_int8,
    linear_int8,
    example=_int8_example,
    supports=_supported,
    backward=_backward(ops.linear_int8),
)
provide(
    ops.linear_int8_dynamic,
    linear_int8_dynamic,
    example=_int8_example,
    supports=_supports_dynamic,
)
provide(
    ops.linear_int4,
    linear_int4,
    example=_int4_example,
    supports=_supported,
    backward=_backward(ops.linear_int4),
    extra_examples=(_int4_small_group_example,),
)
