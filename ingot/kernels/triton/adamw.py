"""`adamw` on GPUs: all tensors in one launch.

A table says where each tensor's parameters, gradients, moments and lower halves lie, how many there
are, and which program is its first. A program finds its tensor by bisection, and does `TILE`
elements of it. The end of a tensor that is no multiple of 16 is done by its last program, on its
own: so everything else is loaded 128 bits at a time.

A parameter in two halves is two integers of 16 bits here, of which a float32 is made, and two again
of that. Gradients in two dtypes take two launches.

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

_SHAPES = ((4096, 4096), (11008, 4096), (4096, 11008), (4096,))
_TILE = 2048
_VECTOR = tl.constexpr(16)
_COLUMNS = tl.constexpr(7)  # of the table: five addresses, elements, first program


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
        if tl.load(table + middle * _COLUMNS + 6) <= program:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def _update(
    p_at, g_at, m_at, v_at, low_at, inside,
    factor, rate, beta1, rest1, beta2, rest2, root, eps, shrink,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Update the elements that are inside."""
    g = factor * tl.load(g_at, inside, other=0.0).to(tl.float32)
    m = beta1 * tl.load(m_at, inside, other=0.0).to(tl.float32) + rest1 * g
    v = beta2 * tl.load(v_at, inside, other=0.0).to(tl.float32) + rest2 * g * g
    tl.store(m_at, m.to(m_at.dtype.element_ty), inside)
    tl.store(v_at, v.to(v_at.dtype.element_ty), inside)
    move = tl.div_rn(rate * m, tl.sqrt_rn(v) * root + eps)
    if SPLIT:
        high = tl.load(p_at, inside, other=0).to(tl.int32) << 16
        bits = high + tl.load(low_at, inside, other=0).to(tl.int32)
        p = bits.to(tl.float32, bitcast=True)
        bits = (p - (shrink * p + move)).to(tl.int32, bitcast=True)
        tl.store(p_at, ((bits + 0x8000) >> 16).to(tl.int16), inside)
        tl.store(low_at, bits.to(tl.int16), inside)
    else:
        p = tl.load(p_at, inside, other=0.0).to(tl.float32)
        tl.store(p_at, (p - (shrink * p + move)).to(p_at.dtype.element_ty), inside)


@kernel(space=_space, bound="bandwidth", scalars=13)
@triton.jit
def _adamw(
    table, a_param, a_grad, a_moment, count,
    factor, rate, beta1, rest1, beta2, rest2, root, eps, shrink,
    TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """A piece of a tensor; of the three tensors that are given, the types matter."""
    program = tl.program_id(0)
    row = table + _owner(table, count, program) * _COLUMNS
    size = tl.load(row + 5)
    start = (program - tl.load(row + 6)) * TILE
    p = tl.multiple_of(tl.load(row).to(a_param.dtype), 16)
    g = tl.multiple_of(tl.load(row + 1).to(a_grad.dtype), 16)
    m = tl.multiple_of(tl.load(row + 2).to(a_moment.dtype), 16)
    v = tl.multiple_of(tl.load(row + 3).to(a_moment.dtype), 16)
    low = p
    if SPLIT:
        low = tl.multiple_of(tl.load(row + 4).to(a_param.dtype), 16)
    at = start + tl.arange(0, TILE)
    whole = size // _VECTOR * _VECTOR
    _update(
        p + at, g + at, m + at, v + at, low + at, at < whole,
        factor, rate, beta1, rest1, beta2, rest2, root, eps, shrink,
        SPLIT,
    )  # fmt: skip
    if (start + TILE >= size) & (whole < size):
        end = whole + tl.arange(0, _VECTOR)
        _update(
            p + end, g + end, m + end, v + end, low + end, end < size,
            factor, rate, beta1, rest1, beta2, rest2, root, eps, shrink,
            SPLIT,
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
    low: list[Tensor],
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    factor: float,
) -> None:
    """For each dtype of gradients one launch, and a table of addresses copied to the GPU."""
    correction1, correction2 = 1 - beta1**step, 1 - beta2**step
    numbers = (
        *(factor, lr / correction1, beta1, 1 - beta1, beta2, 1 - beta2, correction2**-0.5),
        *(eps, lr * decay),
    )
    for dtype in dict.fromkeys(g.dtype for g in grads):
        chosen = [i for i, g in enumerate(grads) if g.dtype == dtype and g.numel()]
        given = [[some[i] for i in chosen] for some in (params, grads, first, second, low) if some]
        if chosen:
            _launch(given, numbers)


def _launch(given: list[list[Tensor]], numbers: tuple[float, ...]) -> None:
    packed = [[_packed(tensor) for tensor in some] for some in given]
    params, grads, first, second, *low = packed
    rows: list[list[int]] = []
    programs = 0
    for tensors in zip(params, grads, first, second, *(low or [params]), strict=True):
        rows.append([*(t.data_ptr() for t in tensors), tensors[0].numel(), programs])
        programs += triton.cdiv(tensors[0].numel(), _TILE)
    table, param = _table(rows, params[0].device), params[0]
    _adamw.launch(
        (programs,),
        *(table, param.view(torch.int16) if low else param, grads[0], first[0], len(rows)),
        *numbers,
        TILE=_TILE,
        SPLIT=bool(low),
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
    params, grads = ([make(*shape) for shape in _SHAPES] for _ in range(2))
    first, second = ([make(*shape, dtype=torch.float32) for shape in _SHAPES] for _ in range(2))
    return params, grads, first, [moment.square() for moment in second], [], 10, 1e-3


def _split_example(make: Meta) -> tuple[Any, ...]:
    """In bfloat16, whatever is asked for."""
    make = Meta(torch.bfloat16, make.device)
    *tensors, _, step, lr = _example(make)
    low = [make.ints(*shape, dtype=torch.int16, below=2**15) for shape in _SHAPES]
    return *tensors, low, step, lr


provide(ops.adamw, adamw, example=_example, also=(_split_example,), supports=_fits)
