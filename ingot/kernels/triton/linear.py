"""`linear` on GPUs: one GEMM kernel for all variants, with the epilogue fused in registers.

Each program computes one tile of the output on the tensor cores with float32 accumulation, looping
over K from start to end. Split-K is not used and the block sizes do not depend on M, so the bits of
a row do not depend on the number of rows. Programs that run concurrently work on neighbouring
tiles, `GROUP_M` rows of tiles before the next column, so that they share operands in L2.

The gradients are GEMMs as well: grad_input with the weight as it is, grad_weight with transposed
views. With an epilogue, the kernel recomputes the pre-activation and multiplies grad_output by the
derivative of the activation before storing it (`BACKWARD`).

The grouped variants (mixture of experts) use the same kernel: a row tile belongs to one group and
reads that group's weight (`packed.py`).

float32 inputs are multiplied in float32, not TF32: an op computes in the dtype of its inputs.
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
from ingot.kernels.triton.activation import activate, activation_grad
from ingot.kernels.triton.kernel import kernel
from ingot.kernels.triton.launch import KernelConfig
from ingot.kernels.triton.packed import find_sequence, max_tiles
from ingot.kernels.triton.provider import Example, ExampleInputs, as_rows, provide
from ingot.kernels.triton.reduce import sum_rows
from ingot.kernels.triton.target import TargetSpec
from ingot.ops.epilogue import IDENTITY, ActivationFn

GROUP_M = 8

# BLOCK_M, BLOCK_N, BLOCK_K, warps, stages.
_TILES = (
    (128, 128, 64, 8, 3),
    (128, 256, 64, 8, 3),
    (128, 128, 64, 4, 3),
    (64, 128, 64, 4, 4),
    (64, 256, 32, 4, 4),
    (128, 64, 64, 8, 3),
    # Smaller tiles spilled too: (128, 64, 64, 4, 4) and (64, 32, 64, 4, 4) on sm_120,
    # (64, 64, 64, 4, 4) on sm_100.
)


def gemm_space(
    target: TargetSpec, itemsize: int, num_accs: int = 1, max_acc_registers: int = 128
) -> Iterator[KernelConfig]:
    """Yield tiles whose operands fit in shared memory and whose accumulators fit in registers.

    `num_accs` is the number of GEMMs computed at once with a shared left operand. The accumulators
    may take `max_acc_registers` registers per thread, at most 64 where there are two of them
    (the epilogue needs both), where operands are also kept in registers, and on sm_100: 128
    spilled.
    """
    if num_accs > 1 or target.max_tile_registers < 128 or target.arch == 100:
        max_acc_registers = min(max_acc_registers, 64)
    seen: set[KernelConfig] = set()
    for block_m, block_n, block_k, num_warps, num_stages in _TILES:
        if itemsize == 4:  # Not on tensor cores: small tiles.
            block_m, block_n, block_k, num_stages = min(block_m, 64), min(block_n, 64), 32, 2
        if target.backend == "hip":
            num_stages = min(num_stages, 2)
        operands = (block_m + num_accs * block_n) * block_k * itemsize
        shared_bytes = operands * (num_stages - (target.backend == "hip"))
        acc_registers = block_m * block_n * num_accs // (target.warp_size * num_warps)
        config = KernelConfig.of(
            num_warps, num_stages, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k
        )
        fits = shared_bytes <= target.max_shared_bytes and acc_registers <= max_acc_registers
        if fits and config not in seen:
            seen.add(config)
            yield config


def _space(
    target: TargetSpec, INPUT_PRECISION: str, NUM_ACCS: int, **others: object
) -> Iterator[KernelConfig]:
    # Activations and float32 residuals need registers as well.
    bare = others.get("ACTIVATION", "none") == "none" and not others.get("FP32_RESIDUAL", False)
    yield from gemm_space(target, itemsize(INPUT_PRECISION), NUM_ACCS, 128 if bare else 64)


def input_precision(dtype: torch.dtype) -> str:
    """Return the `input_precision` of `tl.dot`; it only affects float32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def itemsize(input_precision: str) -> int:
    """Return the size of an operand's element in bytes."""
    return 4 if input_precision == "ieee" else 2


@triton.jit
def swizzle(tile, num_m_tiles, num_n_tiles, GROUP_M: tl.constexpr):
    """Return the row and column of a tile in grouped order (as in Triton's matmul tutorial)."""
    tiles_per_group = GROUP_M * num_n_tiles
    first_m = tile // tiles_per_group * GROUP_M
    group_m = tl.minimum(num_m_tiles - first_m, GROUP_M)
    return first_m + tile % tiles_per_group % group_m, tile % tiles_per_group // group_m


@triton.jit
def gemm_tile(
    x, w, acc, offs_m, offs_n, M, N, K, stride_xm, stride_xk, stride_wn, stride_wk,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Return `acc` plus x[offs_m] @ w[offs_n].T."""
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x + offs_m.to(tl.int64)[:, None] * stride_xm + offs_k[None, :] * stride_xk
    w_ptrs = w + offs_n.to(tl.int64)[None, :] * stride_wn + offs_k[:, None] * stride_wk
    mask_m, mask_n = (offs_m < M)[:, None], (offs_n < N)[None, :]
    for start_k in range(0, K, BLOCK_K):
        if EVEN_K:
            a = tl.load(x_ptrs, mask_m, other=0.0)
            b = tl.load(w_ptrs, mask_n, other=0.0)
        else:
            mask_k = offs_k < K - start_k
            a = tl.load(x_ptrs, mask_m & mask_k[None, :], other=0.0)
            b = tl.load(w_ptrs, mask_n & mask_k[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=INPUT_PRECISION)
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk
    return acc


@triton.jit
def _dual_gemm_tile(
    x, w, up, acc, up_acc, offs_m, offs_n, M, N, K, stride_xm, stride_xk, stride_wn, stride_wk,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, INPUT_PRECISION: tl.constexpr,
):  # fmt: skip
    """Accumulate x times two weights, loading x once."""
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x + offs_m.to(tl.int64)[:, None] * stride_xm + offs_k[None, :] * stride_xk
    w_offs = offs_n.to(tl.int64)[None, :] * stride_wn + offs_k[:, None] * stride_wk
    w_ptrs, up_ptrs = w + w_offs, up + w_offs
    mask_m, mask_n = (offs_m < M)[:, None], (offs_n < N)[None, :]
    for start_k in range(0, K, BLOCK_K):
        mask_k = offs_k < K - start_k
        x_mask, w_mask = mask_m, mask_n
        if not EVEN_K:
            x_mask, w_mask = mask_m & mask_k[None, :], mask_n & mask_k[:, None]
        a = tl.load(x_ptrs, x_mask, other=0.0)
        b = tl.load(w_ptrs, w_mask, other=0.0)
        c = tl.load(up_ptrs, w_mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=INPUT_PRECISION)
        up_acc = tl.dot(a, c, up_acc, input_precision=INPUT_PRECISION)
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk
        up_ptrs += BLOCK_K * stride_wk
    return acc, up_acc


@kernel(space=_space, bound_by="tensor cores")
@triton.jit
def _linear(
    x, w, up, bias, residual, grad_output, y, grad_up, offsets,
    M, N, K, num_groups, stride_xm, stride_xk, stride_wg, stride_wn, stride_wk, stride_rm,
    ACTIVATION: tl.constexpr, BACKWARD: tl.constexpr, EVEN_K: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, NUM_ACCS: tl.constexpr, FP32_RESIDUAL: tl.constexpr,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of the GEMM and its epilogue."""
    num_n_tiles = tl.cdiv(N, BLOCK_N)
    num_m_tiles = tl.num_programs(0) // num_n_tiles
    m_tile, n_tile = swizzle(tl.program_id(0), num_m_tiles, num_n_tiles, GROUP_M)
    offs_n = n_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if offsets is not None:
        group = find_sequence(offsets, num_groups, m_tile, 1, BLOCK_M)
        start_m = tl.load(offsets + group).to(tl.int32)
        M = tl.load(offsets + group + 1).to(tl.int32)
        tile_in_group = m_tile - start_m // BLOCK_M - group
        offs_m = start_m + tile_in_group * BLOCK_M + tl.arange(0, BLOCK_M)
        w += group.to(tl.int64) * stride_wg
    else:
        group = 0
        offs_m = m_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if up is None:
        acc = gemm_tile(
            x, w, acc, offs_m, offs_n, M, N, K, stride_xm, stride_xk, stride_wn, stride_wk,
            BLOCK_K, EVEN_K, INPUT_PRECISION,
        )  # fmt: skip
        up_acc = acc
    else:
        up_acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up += group * stride_wg
        acc, up_acc = _dual_gemm_tile(
            x, w, up, acc, up_acc, offs_m, offs_n, M, N, K, stride_xm, stride_xk, stride_wn,
            stride_wk, BLOCK_K, EVEN_K, INPUT_PRECISION,
        )  # fmt: skip
    if bias is not None:
        acc += tl.load(bias + offs_n, offs_n < N, other=0.0).to(tl.float32)[None, :]
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    offs = offs_m.to(tl.int64)[:, None] * N + offs_n[None, :]
    if BACKWARD:
        grad = tl.load(grad_output + offs, mask, other=0.0).to(tl.float32)
        if up is not None:
            grad_up_tile = grad * activate(acc, ACTIVATION)
            tl.store(grad_up + offs, grad_up_tile.to(grad_up.dtype.element_ty), mask)
            grad *= up_acc
        result = grad * activation_grad(acc, ACTIVATION)
    else:
        result = activate(acc, ACTIVATION)
        if up is not None:
            result *= up_acc
        if residual is not None:
            residual_ptrs = residual + offs_m.to(tl.int64)[:, None] * stride_rm + offs_n[None, :]
            result += tl.load(residual_ptrs, mask, other=0.0).to(tl.float32)
    tl.store(y + offs, result.to(y.dtype.element_ty), mask)


@kernel(space=_space, bound_by="tensor cores")
@triton.jit
def _grouped_grad_weight(
    grad_output, x, grad_weight, offsets, N, K, stride_gm, stride_xm,
    INPUT_PRECISION: tl.constexpr, NUM_ACCS: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of a group's weight gradient (N, K), summed over the group's rows."""
    n_tile, k_tile = swizzle(tl.program_id(0), tl.cdiv(N, BLOCK_M), tl.cdiv(K, BLOCK_N), GROUP_M)
    group = tl.program_id(1)
    start_m = tl.load(offsets + group).to(tl.int64)
    group_m = (tl.load(offsets + group + 1) - start_m).to(tl.int32)
    offs_n = n_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = k_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = gemm_tile(
        grad_output + start_m * stride_gm, x + start_m * stride_xm, acc, offs_n, offs_k, N, K,
        group_m, 1, stride_gm, 1, stride_xm, BLOCK_K, False, INPUT_PRECISION,
    )  # fmt: skip
    mask = (offs_n < N)[:, None] & (offs_k < K)[None, :]
    offs = (group.to(tl.int64) * N + offs_n.to(tl.int64)[:, None]) * K + offs_k[None, :]
    tl.store(grad_weight + offs, acc.to(grad_weight.dtype.element_ty), mask)


def matmul(
    x: Tensor,
    weight: Tensor,
    *,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    grad_output: Tensor | None = None,
    offsets: Tensor | None = None,
    activation: str = "none",
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute x (M, K) @ weight (N, K).T with a fused epilogue; any strides.

    With `offsets`, the weight is (E, N, K). With `grad_output` (M, N), return the gradient of the
    GEMM's output before the epilogue, and that of the second GEMM (`up`), instead of the result.
    """
    (M, K), N = x.shape, weight.shape[-2]
    y = x.new_empty((M, N)) if out is None else out
    grad_up = y if up is None or grad_output is None else x.new_empty((M, N))
    if up is not None and up.stride() != weight.stride():
        up, weight = up.contiguous(), weight.contiguous()
    stride_wg, stride_wn, stride_wk = (0, *weight.stride())[-3:]
    num_groups = 0 if offsets is None else len(offsets) - 1

    def grid(constants: dict[str, Any]) -> tuple[int]:
        block_m = constants["BLOCK_M"]
        num_m_tiles = max_tiles(M, num_groups, block_m) if num_groups else triton.cdiv(M, block_m)
        return (num_m_tiles * triton.cdiv(N, constants["BLOCK_N"]),)

    _linear.launch(
        grid,
        *(x, weight, up, None if bias is None else bias.contiguous(), residual, grad_output),
        *(y, grad_up, offsets, M, N, K, num_groups, *x.stride(), stride_wg, stride_wn, stride_wk),
        0 if residual is None else residual.stride(0),
        ACTIVATION=activation,
        BACKWARD=grad_output is not None,
        EVEN_K=K % 64 == 0,
        INPUT_PRECISION=input_precision(x.dtype),
        NUM_ACCS=1 if up is None else 2,
        FP32_RESIDUAL=residual is not None and residual.dtype == torch.float32,
        GROUP_M=GROUP_M,
        shape=(N, K),
    )
    return y, grad_up


def _unflatten(rows: Tensor, x: Tensor) -> Tensor:
    return rows.view(*x.shape[:-1], rows.shape[-1])


def _flatten(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _activation_name(activation: int) -> str:
    return "none" if activation == ActivationFn.IDENTITY else ActivationFn(activation).name.lower()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
    *lora: None,
) -> Tensor:
    """Launch one GEMM with its epilogue."""
    y, _ = matmul(
        _flatten(x),
        weight,
        bias=bias,
        residual=None if residual is None else as_rows(residual),
        activation=_activation_name(activation),
    )
    return _unflatten(y, x)


def gated_linear(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, activation: int, *_: None
) -> Tensor:
    """Launch one kernel that computes both GEMMs."""
    name = _activation_name(activation)
    return _unflatten(matmul(_flatten(x), gate_weight, up=up_weight, activation=name)[0], x)


def _grads(
    needs: list[bool], grad_output: Tensor, x: Tensor, weight: Tensor
) -> list[Tensor | None]:
    """Return the gradients of x, weight and bias from that of the GEMM's output."""
    return [
        _unflatten(matmul(grad_output, weight.T)[0], x) if needs[0] else None,
        matmul(grad_output.T, _flatten(x).T)[0] if needs[1] else None,
        sum_rows(grad_output, grad_output.dtype) if needs[2] else None,
    ]


def _backward(
    needs: list[bool],
    grads: list[Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: int,
    residual: Tensor | None,
    *lora: None,
) -> list[Tensor | None]:
    grad_output = as_rows(grads[0])
    if activation != ActivationFn.IDENTITY:
        grad_output, _ = matmul(
            _flatten(x),
            weight,
            bias=bias,
            grad_output=grad_output.contiguous(),
            activation=_activation_name(activation),
        )
    grad_residual = grads[0] if needs[4] else None
    return [*_grads(needs, grad_output, x, weight), None, grad_residual, *lora]


def _gated_backward(
    needs: list[bool],
    grads: list[Tensor],
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    activation: int,
    *lora: None,
) -> list[Tensor | None]:
    rows, name = _flatten(x), _activation_name(activation)
    grad_output = as_rows(grads[0]).contiguous()
    grad_gate, grad_up = matmul(
        rows, gate_weight, up=up_weight, grad_output=grad_output, activation=name
    )
    grad_x = None
    if needs[0]:
        through_gate, _ = matmul(grad_gate, gate_weight.T)
        grad_x = _unflatten(matmul(grad_up, up_weight.T, residual=through_gate)[0], x)
    return [
        grad_x,
        matmul(grad_gate.T, rows.T)[0] if needs[1] else None,
        matmul(grad_up.T, rows.T)[0] if needs[2] else None,
        None,
        *lora,
    ]


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor, activation: int) -> Tensor:
    """Launch one kernel for all groups."""
    name = _activation_name(activation)
    return matmul(x, weight, offsets=offsets.contiguous(), activation=name)[0]


def grouped_gated_linear(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, offsets: Tensor, activation: int
) -> Tensor:
    """Launch one kernel for both GEMMs of all groups."""
    offsets, name = offsets.contiguous(), _activation_name(activation)
    return matmul(x, gate_weight, up=up_weight, offsets=offsets, activation=name)[0]


def _grouped_weight_grad(grad_output: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    grad_weight = weight.new_empty(weight.shape)
    grad_output, x = as_rows(grad_output), as_rows(x)
    num_groups, N, K = weight.shape

    def grid(constants: dict[str, Any]) -> tuple[int, int]:
        num_n_tiles = triton.cdiv(N, constants["BLOCK_M"])
        return num_n_tiles * triton.cdiv(K, constants["BLOCK_N"]), num_groups

    _grouped_grad_weight.launch(
        grid,
        *(grad_output, x, grad_weight, offsets, N, K, grad_output.stride(0), x.stride(0)),
        INPUT_PRECISION=input_precision(x.dtype),
        NUM_ACCS=1,
        GROUP_M=GROUP_M,
    )
    return grad_weight


def _grouped_backward(
    needs: list[bool],
    grads: list[Tensor],
    x: Tensor,
    weight: Tensor,
    offsets: Tensor,
    activation: int,
) -> list[Tensor | None]:
    offsets, grad_output = offsets.contiguous(), grads[0]
    if activation != ActivationFn.IDENTITY:
        grad_output, _ = matmul(
            x,
            weight,
            grad_output=grad_output.contiguous(),
            offsets=offsets,
            activation=_activation_name(activation),
        )
    return [
        matmul(grad_output, weight.transpose(1, 2), offsets=offsets)[0] if needs[0] else None,
        _grouped_weight_grad(grad_output, x, weight, offsets) if needs[1] else None,
        None,
        None,
    ]


def _grouped_gated_backward(
    needs: list[bool],
    grads: list[Tensor],
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    offsets: Tensor,
    activation: int,
) -> list[Tensor | None]:
    offsets = offsets.contiguous()
    grad_gate, grad_up = matmul(
        x,
        gate_weight,
        up=up_weight,
        grad_output=grads[0].contiguous(),
        offsets=offsets,
        activation=_activation_name(activation),
    )
    grad_x = None
    if needs[0]:
        through_gate, _ = matmul(grad_gate, gate_weight.transpose(1, 2), offsets=offsets)
        up_weight_T = up_weight.transpose(1, 2)
        grad_x, _ = matmul(grad_up, up_weight_T, residual=through_gate, offsets=offsets)
    return [
        grad_x,
        _grouped_weight_grad(grad_gate, x, gate_weight, offsets) if needs[1] else None,
        _grouped_weight_grad(grad_up, x, up_weight, offsets) if needs[2] else None,
        None,
        None,
    ]


def _supported(x: Tensor, weight: Tensor, *_: object) -> bool:
    return x.numel() > 0 and weight.numel() > 0


def _supported_without_lora(x: Tensor, weight: Tensor, *args: Tensor | int | None) -> bool:
    lora_index, lora_b = args[-1], args[-2]
    return lora_b is None and lora_index is None and _supported(x, weight)


def _example(make: ExampleInputs) -> tuple[Any, ...]:
    return make(4096, 4096), make(4096, 4096), make(4096)


def _residual_example(make: ExampleInputs) -> tuple[Any, ...]:
    return make(4096, 11008), make(4096, 11008), None, IDENTITY, make(4096, 4096)


def _activation_example(activation: ActivationFn) -> Example:
    return lambda make: (*_example(make), int(activation))


def _gated_example(make: ExampleInputs) -> tuple[Any, ...]:
    return make(4096, 4096), make(11008, 4096), make(11008, 4096)


def _grouped_example(make: ExampleInputs) -> tuple[Any, ...]:
    return make(8192, 2048), make(64, 1408, 2048), make.offsets(64, 8192)


def _grouped_gated_example(make: ExampleInputs) -> tuple[Any, ...]:
    x, weight, offsets = _grouped_example(make)
    return x, weight, weight, offsets


provide(
    ops.linear,
    linear,
    example=_example,
    epilogue_examples=(
        *(_activation_example(fn) for fn in ActivationFn if fn != IDENTITY),
        _residual_example,
    ),
    supports=_supported_without_lora,
    backward=_backward,
)
provide(
    ops.gated_linear,
    gated_linear,
    example=_gated_example,
    supports=_supported_without_lora,
    backward=_gated_backward,
)
# All groups have rows in the example: every weight is read.
_GROUPED_COST = 2 * (8192 * (2048 + 1408) + 64 * 1408 * 2048), 2 * 8192 * 1408 * 2048
provide(
    ops.grouped_linear,
    grouped_linear,
    example=_grouped_example,
    supports=_supported,
    backward=_grouped_backward,
    cost=_GROUPED_COST,
)
provide(
    ops.grouped_gated_linear,
    grouped_gated_linear,
    example=_grouped_gated_example,
    supports=_supported,
    backward=_grouped_gated_backward,
    cost=(_GROUPED_COST[0] + 2 * 64 * 1408 * 2048, 2 * _GROUPED_COST[1]),
)
