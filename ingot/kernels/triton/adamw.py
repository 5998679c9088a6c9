"""`adamw` on GPUs: all tensors in one launch.

A table says where each tensor's parameters, gradients and moments lie, how many there are, and
which program is its first. A program finds its tensor by bisection, and does `TILE` elements of it.
The end of a tensor that is no multiple of 16 is done by its last program, on its own: so everything
else is loaded 128 bits at a time.

Tensors with gaps are copied, and copied back. So are those that do not begin at a multiple of 16
bytes, as slices may; allocations do.
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
from ingot.kernels.triton.kernel import Config, kernel
from ingot.kernels.triton.provider import Meta, provide
from ingot.kernels.triton.target import Target

_TILE = 2048
_VECTOR = tl.constexpr(16)
_COLUMNS = tl.constexpr(6)  # of the table: four addresses, elements, first program


def _space(target: Target, TILE: int, **_: object) -> Iterator[Config]:
    for share in (8, 16):  # elements a thread: of four tensors, and two results
        yield Config.of(TILE // (share * target.lanes))


@triton.jit
def _owner(table, count, program):
    """The last tensor whose first program is not behind this one."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if tl.load(table + middle * _COLUMNS + 5) <= program:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _update(
    p_at, g_at, m_at, v_at, inside,
    rate, beta1, rest1, beta2, rest2, root, eps, kept,
):  # fmt: skip
    """Update the elements that are inside."""
    g = tl.load(g_at, inside, other=0.0).to(tl.float32)
    m = beta1 * tl.load(m_at, inside, other=0.0) + rest1 * g
    v = beta2 * tl.load(v_at, inside, other=0.0) + rest2 * g * g
    p = tl.load(p_at, inside, other=0.0).to(tl.float32)
    p = kept * p - tl.div_rn(rate * m, tl.sqrt_rn(v) * root + eps)
    tl.store(m_at, m, inside)
    tl.store(v_at, v, inside)
    tl.store(p_at, p.to(p_at.dtype.element_ty), inside)


@kernel(space=_space, bound="bandwidth", scalars=11)
@triton.jit
def _adamw(
    table, a_param, a_moment, count,
    rate, beta1, rest1, beta2, rest2, root, eps, kept,
    TILE: tl.constexpr,
):  # fmt: skip
    """A piece of a tensor; of the two tensors that are given, the types matter."""
    program = tl.program_id(0)
    row = table + _owner(table, count, program) * _COLUMNS
    size = tl.load(row + 4)
    start = (program - tl.load(row + 5)) * TILE
    p = tl.multiple_of(tl.load(row).to(a_param.dtype), 16)
    g = tl.multiple_of(tl.load(row + 1).to(a_param.dtype), 16)
    m = tl.multiple_of(tl.load(row + 2).to(a_moment.dtype), 16)
    v = tl.multiple_of(tl.load(row + 3).to(a_moment.dtype), 16)
    at = start + tl.arange(0, TILE)
    whole = size // _VECTOR * _VECTOR
    _update(
        p + at, g + at, m + at, v + at, at < whole,
        rate, beta1, rest1, beta2, rest2, root, eps, kept,
    )  # fmt: skip
    if (start + TILE >= size) & (whole < size):
        end = whole + tl.arange(0, _VECTOR)
        _update(
            p + end, g + end, m + end, v + end, end < size,
            rate, beta1, rest1, beta2, rest2, root, eps, kept,
        )  # fmt: skip


def _packed(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that a kernel can walk through."""
    # A copy has an allocation of its own, which is aligned.
    fits = tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)


def adamw(
    params: list[Tensor],
    grads: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> None:
    """One kernel, and a table of addresses that is copied to the GPU."""
    filled = [place for place, p in enumerate(params) if p.numel()]
    given = [[values[place] for place in filled] for values in (params, grads, first, second)]
    packed = [[_packed(tensor) for tensor in tensors] for tensors in given]
    rows: list[list[int]] = []
    programs = 0
    for tensors in zip(*packed, strict=True):
        rows.append([*(t.data_ptr() for t in tensors), tensors[0].numel(), programs])
        programs += triton.cdiv(tensors[0].numel(), _TILE)
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    _adamw.launch(
        (programs,),
        *(_table(rows, params[0].device), packed[0][0], packed[2][0], len(rows)),
        *(lr / correction1, beta1, 1 - beta1, beta2, 1 - beta2, correction2**-0.5),
        *(eps, 1 - lr * decay),
        TILE=_TILE,
    )
    for before, after in zip(given, packed, strict=True):
        for tensor, copy in zip(before, after, strict=True):
            if copy is not tensor and before is not given[1]:
                tensor.copy_(copy)


def _table(rows: list[list[int]], device: torch.device) -> Tensor:
    if device.type != "cuda":
        return torch.tensor(rows, device=device)
    # From pinned memory, so that nobody waits until the GPU has come so far.
    return torch.tensor(rows).pin_memory().to(device, non_blocking=True)


def _fits(params: list[Tensor], *_: object) -> bool:
    return any(p.numel() for p in params)


def _example(make: Meta) -> tuple[Any, ...]:
    shapes = ((4096, 4096), (11008, 4096), (4096, 11008), (4096,))
    params, grads = ([make(*shape) for shape in shapes] for _ in range(2))
    first, second = ([make(*shape, dtype=torch.float32) for shape in shapes] for _ in range(2))
    return params, grads, first, [moment.square() for moment in second], 10, 1e-3


provide(ops.adamw, adamw, example=_example, supports=_fits)
