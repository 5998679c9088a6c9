"""`adamw` on GPUs: all tensors in one launch.

A table holds, for each tensor, the addresses of its parameters, gradients, moments and low halves,
its number of elements and its first program. A program finds its tensor by bisection and updates
`BLOCK` elements of it. If a tensor's size is not a multiple of 16, its last program updates the
rest separately, so that everything else is loaded 128 bits at a time.

A split master weight is stored as two 16-bit integers, which are combined to a float32 and split
again. Gradients in two dtypes take two launches.

Tensors that are not contiguous, or not aligned to 16 bytes (as slices may be), are copied, and
copied back afterwards.
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
from ingot.kernels.triton.kernel import kernel
from ingot.kernels.triton.launch import KernelConfig
from ingot.kernels.triton.provider import ExampleInputs, provide
from ingot.kernels.triton.target import TargetSpec

_SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (4096,))
_BLOCK = 2048
_VECTOR = tl.constexpr(16)
_TABLE_COLUMNS = tl.constexpr(7)  # five addresses, number of elements, first program


def _space(target: TargetSpec, BLOCK: int, **_: object) -> Iterator[KernelConfig]:
    for per_thread in (8, 16):  # elements of four inputs and two outputs
        yield KernelConfig.of(BLOCK // (per_thread * target.warp_size))


@triton.jit
def _find_tensor(table, num_tensors, program):
    """Return the last tensor whose first program is not after this one."""
    low = 0
    high = num_tensors
    while low < high:
        middle = (low + high) // 2
        if tl.load(table + middle * _TABLE_COLUMNS + 6) <= program:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _update(
    p_ptrs, g_ptrs, m_ptrs, v_ptrs, lo_ptrs, mask, grad_scale, step_size, beta1, one_minus_beta1,
    beta2, one_minus_beta2, inv_sqrt_correction2, eps, lr_weight_decay,
    SPLIT_MASTER: tl.constexpr,
):  # fmt: skip
    """Update the elements under the mask."""
    g = grad_scale * tl.load(g_ptrs, mask, other=0.0).to(tl.float32)
    m = beta1 * tl.load(m_ptrs, mask, other=0.0).to(tl.float32) + one_minus_beta1 * g
    v = beta2 * tl.load(v_ptrs, mask, other=0.0).to(tl.float32) + one_minus_beta2 * g * g
    tl.store(m_ptrs, m.to(m_ptrs.dtype.element_ty), mask)
    tl.store(v_ptrs, v.to(v_ptrs.dtype.element_ty), mask)
    update = tl.div_rn(step_size * m, tl.sqrt_rn(v) * inv_sqrt_correction2 + eps)
    if SPLIT_MASTER:
        high = tl.load(p_ptrs, mask, other=0).to(tl.int32) << 16
        bits = high + tl.load(lo_ptrs, mask, other=0).to(tl.int32)
        p = bits.to(tl.float32, bitcast=True)
        bits = (p - (lr_weight_decay * p + update)).to(tl.int32, bitcast=True)
        tl.store(p_ptrs, ((bits + 0x8000) >> 16).to(tl.int16), mask)
        tl.store(lo_ptrs, bits.to(tl.int16), mask)
    else:
        p = tl.load(p_ptrs, mask, other=0.0).to(tl.float32)
        tl.store(p_ptrs, (p - (lr_weight_decay * p + update)).to(p_ptrs.dtype.element_ty), mask)


@kernel(space=_space, bound_by="bandwidth", scalar_loads=13)
@triton.jit
def _adamw(
    table, param_like, grad_like, moment_like, num_tensors, grad_scale, step_size, beta1,
    one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, lr_weight_decay,
    BLOCK: tl.constexpr, SPLIT_MASTER: tl.constexpr,
):  # fmt: skip
    """Update a block of a tensor; the three `_like` tensors only provide types."""
    program = tl.program_id(0)
    row = table + _find_tensor(table, num_tensors, program) * _TABLE_COLUMNS
    size = tl.load(row + 5)
    start = (program - tl.load(row + 6)) * BLOCK
    p = tl.multiple_of(tl.load(row).to(param_like.dtype), 16)
    g = tl.multiple_of(tl.load(row + 1).to(grad_like.dtype), 16)
    m = tl.multiple_of(tl.load(row + 2).to(moment_like.dtype), 16)
    v = tl.multiple_of(tl.load(row + 3).to(moment_like.dtype), 16)
    lo = p
    if SPLIT_MASTER:
        lo = tl.multiple_of(tl.load(row + 4).to(param_like.dtype), 16)
    offs = start + tl.arange(0, BLOCK)
    vector_end = size // _VECTOR * _VECTOR
    _update(
        p + offs, g + offs, m + offs, v + offs, lo + offs, offs < vector_end, grad_scale, step_size,
        beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, lr_weight_decay,
        SPLIT_MASTER,
    )  # fmt: skip
    if (start + BLOCK >= size) & (vector_end < size):
        tail = vector_end + tl.arange(0, _VECTOR)
        _update(
            p + tail, g + tail, m + tail, v + tail, lo + tail, tail < size, grad_scale, step_size,
            beta1, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps,
            lr_weight_decay,
            SPLIT_MASTER,
        )  # fmt: skip


def _aligned_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor, or an aligned and contiguous copy."""
    # A copy has its own allocation, which is aligned.
    fits = tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def adamw(
    params: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    low: list[Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    factor: float,
    row_stats: None,
) -> None:
    """Launch one kernel per gradient dtype, with a table of addresses copied to the GPU."""
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    scalars = (
        *(factor, lr / correction1, beta1, 1 - beta1, beta2, 1 - beta2, correction2**-0.5),
        *(eps, lr * decay),
    )
    for dtype in dict.fromkeys(g.dtype for g in grads):
        indices = [i for i, g in enumerate(grads) if g.dtype == dtype and g.numel()]
        tensor_lists = [
            [tensors[i] for i in indices]
            for tensors in (params, grads, first, second, low)
            if tensors
        ]
        if indices:
            _launch(tensor_lists, scalars)


def _launch(tensor_lists: list[list[Tensor]], scalars: tuple[float, ...]) -> None:
    aligned_lists = [
        [_aligned_contiguous(tensor) for tensor in tensors] for tensors in tensor_lists
    ]
    params, grads, first, second, *low = aligned_lists
    rows: list[list[int]] = []
    num_programs = 0
    for tensors in zip(params, grads, first, second, *(low or [params]), strict=True):
        rows.append([*(t.data_ptr() for t in tensors), tensors[0].numel(), num_programs])
        num_programs += triton.cdiv(tensors[0].numel(), _BLOCK)
    table, param = _device_table(rows, params[0].device), params[0]
    _adamw.launch(
        (num_programs,),
        *(table, param.view(torch.int16) if low else param, grads[0], first[0], len(rows)),
        *scalars,
        BLOCK=_BLOCK,
        SPLIT_MASTER=bool(low),
    )
    for originals, copies in zip(tensor_lists, aligned_lists, strict=True):
        for tensor, copy in zip(originals, copies, strict=True):
            if copy is not tensor and originals is not tensor_lists[1]:
                tensor.copy_(copy)


def _device_table(rows: list[list[int]], device: torch.device) -> Tensor:
    if device.type != "cuda":
        return torch.tensor(rows, device=device)
    # From pinned memory, so that the host does not wait for the GPU.
    return torch.tensor(rows).pin_memory().to(device, non_blocking=True)


def _supported(params: list[Tensor], *rest: object) -> bool:
    return rest[-1] is None and any(p.numel() for p in params)


def _example(make: ExampleInputs) -> tuple[Any, ...]:
    params, grads = ([make(*shape) for shape in _SHAPES] for _ in range(2))
    first, second = ([make(*shape, dtype=torch.float32) for shape in _SHAPES] for _ in range(2))
    return params, grads, first, [moment.square() for moment in second], [], 10, 1e-3


def _split_example(make: ExampleInputs) -> tuple[Any, ...]:
    """Return an example in bfloat16, whatever the requested dtype."""
    make = ExampleInputs(torch.bfloat16, make.device)
    *tensors, _, step, lr = _example(make)
    low = [make.ints(*shape, dtype=torch.int16, below=2**15) for shape in _SHAPES]
    return *tensors, low, step, lr


provide(ops.adamw, adamw, example=_example, extra_examples=(_split_example,), supports=_supported)
