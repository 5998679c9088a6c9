"""`linear` on GPUs: one kernel for every product, with its epilogue on the sums in registers.

A program computes a tile of the result on the tensor cores, in float32, walking along the inner
dimension from its beginning to its end. Nothing is split along it, and tiles do not depend on the
number of rows: so a row's bits do not depend on it either. Programs that run together are given
tiles that lie together, `GROUP` rows of tiles down before one across, so that they find what they
read in L2.

Gradients are products too: of x by the weight as it is, of the weight by views that are turned.
With an epilogue, the kernel computes the product once more and multiplies the incoming gradient by
the epilogue's derivative before it stores it (`BACKWARD`).

Groups (a mixture of experts) are the same kernel: a tile of rows belongs to one group, and takes
its weight (`packed.py`).

float32 is multiplied as such, not as TF32: an op computes in the dtype it is given.
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
from ingot.kernels.triton.activation import activate, derivative
from ingot.kernels.triton.kernel import Config, kernel
from ingot.kernels.triton.packed import owner, tiles
from ingot.kernels.triton.provider import Meta, as_rows, provide
from ingot.kernels.triton.reduce import sum_rows
from ingot.kernels.triton.target import Target
from ingot.ops.gradient import Backward

GROUP = 8

# Rows, columns, inner dimension of a tile, warps, stages.
_TILES = (
    (128, 128, 64, 8, 3),
    (128, 256, 64, 8, 3),
    (128, 128, 64, 4, 3),
    (64, 128, 64, 4, 4),
    (64, 256, 32, 4, 4),
    (128, 64, 64, 8, 3),
    # Smaller ones spilled too: (128, 64, 64, 4, 4) and (64, 32, 64, 4, 4) on sm_120,
    # (64, 64, 64, 4, 4) on sm_100.
)


def tile_space(
    target: Target, itemsize: int, products: int = 1, most: int = 128
) -> Iterator[Config]:
    """Tiles that fit: their operands shared memory, their sums half of a thread's registers.

    `products` is how many there are at once, of one left operand. Sums may take a quarter of the
    registers where there are two, as the epilogue needs both, and where operands are in registers
    too, and on sm_100: half did spill. `most` is for kernels that need registers for more.
    """
    if products > 1 or target.tile_registers < 128 or target.arch == 100:
        most = min(most, 64)
    seen: set[Config] = set()
    for rows, columns, inner, warps, stages in _TILES:
        if itemsize == 4:  # on no tensor core: small tiles
            rows, columns, inner, stages = min(rows, 64), min(columns, 64), 32, 2
        if target.backend == "hip":
            stages = min(stages, 2)
        elements = (rows + products * columns) * inner
        shared = elements * itemsize * (stages - (target.backend == "hip"))
        sums = rows * columns * products // (target.lanes * warps)
        config = Config.of(warps, stages, ROWS=rows, COLUMNS=columns, INNER=inner)
        if shared <= target.shared_program and sums <= most and config not in seen:
            seen.add(config)
            yield config


def _space(target: Target, PRECISION: str, PRODUCTS: int, **others: object) -> Iterator[Config]:
    plain = others.get("KIND", "none") == "none" and others.get("HELD", 1) == 1
    most = 128 if plain else 64  # activations need registers too, and so do float32 residuals
    yield from tile_space(target, itemsize(PRECISION), PRODUCTS, most)


def precision(dtype: torch.dtype) -> str:
    """How `tl.dot` is to multiply: matters for float32 alone."""
    return "ieee" if dtype == torch.float32 else "tf32"


def itemsize(precision: str) -> int:
    """Bytes of an operand's element."""
    return 4 if precision == "ieee" else 2


@triton.jit
def swizzle(tile, row_tiles, column_tiles, GROUP: tl.constexpr):
    """The row and column of a tile, in an order that goes down before it goes across."""
    of_group = GROUP * column_tiles
    first = tile // of_group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    return first + tile % of_group % size, tile % of_group // size


@triton.jit
def product(
    x, w, total, row, column, rows, columns, depth, x_row, x_inner, w_row, w_inner,
    INNER: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`total` plus the rows of x times the rows of w, for a tile of both."""
    inner = tl.arange(0, INNER)
    x_at = x + row.to(tl.int64)[:, None] * x_row + inner[None, :] * x_inner
    w_at = w + column.to(tl.int64)[None, :] * w_row + inner[:, None] * w_inner
    row_inside, column_inside = (row < rows)[:, None], (column < columns)[None, :]
    for first in range(0, depth, INNER):
        if EVEN:
            a = tl.load(x_at, row_inside, other=0.0)
            b = tl.load(w_at, column_inside, other=0.0)
        else:
            left = inner < depth - first
            a = tl.load(x_at, row_inside & left[None, :], other=0.0)
            b = tl.load(w_at, column_inside & left[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        x_at += INNER * x_inner
        w_at += INNER * w_inner
    return total


@kernel(space=_space, bound="tensor cores")
@triton.jit
def _linear(
    x, w, up, bias, residual, grad, y, up_grad, offsets,
    rows, columns, depth, groups, x_row, x_inner, w_group, w_row, w_inner, residual_row,
    KIND: tl.constexpr, BACKWARD: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    PRODUCTS: tl.constexpr, HELD: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of the product and its epilogue."""
    column_tiles = tl.cdiv(columns, COLUMNS)
    row_tiles = tl.num_programs(0) // column_tiles
    row_tile, column_tile = swizzle(tl.program_id(0), row_tiles, column_tiles, GROUP)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    if offsets is not None:
        group = owner(offsets, groups, row_tile, 1, ROWS)
        start = tl.load(offsets + group).to(tl.int32)
        rows = tl.load(offsets + group + 1).to(tl.int32)
        row = start + (row_tile - start // ROWS - group) * ROWS + tl.arange(0, ROWS)
        w += group.to(tl.int64) * w_group
    else:
        group = 0
        row = row_tile * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    if up is None:
        total = product(
            x, w, total, row, column, rows, columns, depth, x_row, x_inner, w_row, w_inner,
            INNER, EVEN, PRECISION,
        )  # fmt: skip
        other = total
    else:
        other = tl.zeros([ROWS, COLUMNS], tl.float32)
        up += group * w_group
        total, other = _two_products(
            x, w, up, total, other, row, column, rows, columns, depth, x_row, x_inner, w_row,
            w_inner, INNER, EVEN, PRECISION,
        )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + column, column < columns, other=0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    if BACKWARD:
        given = tl.load(grad + at, inside, other=0.0).to(tl.float32)
        if up is not None:
            of_up = given * activate(total, KIND)
            tl.store(up_grad + at, of_up.to(up_grad.dtype.element_ty), inside)
            given *= other
        result = given * derivative(total, KIND)
    else:
        result = activate(total, KIND)
        if up is not None:
            result *= other
        if residual is not None:
            beside = residual + row.to(tl.int64)[:, None] * residual_row + column[None, :]
            result += tl.load(beside, inside, other=0.0).to(tl.float32)
    tl.store(y + at, result.to(y.dtype.element_ty), inside)


@triton.jit
def _two_products(
    x, w, up, total, other, row, column, rows, columns, depth, x_row, x_inner, w_row, w_inner,
    INNER: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products with two weights, reading x once."""
    inner = tl.arange(0, INNER)
    x_at = x + row.to(tl.int64)[:, None] * x_row + inner[None, :] * x_inner
    beside = column.to(tl.int64)[None, :] * w_row + inner[:, None] * w_inner
    w_at, up_at = w + beside, up + beside
    row_inside, column_inside = (row < rows)[:, None], (column < columns)[None, :]
    for first in range(0, depth, INNER):
        left = inner < depth - first
        x_inside, w_inside = row_inside, column_inside
        if not EVEN:
            x_inside, w_inside = row_inside & left[None, :], column_inside & left[:, None]
        a = tl.load(x_at, x_inside, other=0.0)
        b = tl.load(w_at, w_inside, other=0.0)
        c = tl.load(up_at, w_inside, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        other = tl.dot(a, c, other, input_precision=PRECISION)
        x_at += INNER * x_inner
        w_at += INNER * w_inner
        up_at += INNER * w_inner
    return total, other


@kernel(space=_space, bound="tensor cores")
@triton.jit
def _grouped_weight(
    grad, x, of_weight, offsets, columns, depth, grad_row, x_row,
    PRECISION: tl.constexpr, PRODUCTS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of a group's weight (out, in): a sum over the group's rows."""
    column_tiles = tl.cdiv(depth, COLUMNS)
    row_tile, column_tile = swizzle(tl.program_id(0), tl.cdiv(columns, ROWS), column_tiles, GROUP)
    group = tl.program_id(1)
    start = tl.load(offsets + group).to(tl.int64)
    count = (tl.load(offsets + group + 1) - start).to(tl.int32)
    out = row_tile * ROWS + tl.arange(0, ROWS)
    channel = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = product(
        grad + start * grad_row, x + start * x_row, total, out, channel, columns, depth, count,
        1, grad_row, 1, x_row, INNER, False, PRECISION,
    )  # fmt: skip
    inside = (out < columns)[:, None] & (channel < depth)[None, :]
    at = (group.to(tl.int64) * columns + out.to(tl.int64)[:, None]) * depth + channel[None, :]
    tl.store(of_weight + at, total.to(of_weight.dtype.element_ty), inside)


def matmul(
    x: Tensor,
    weight: Tensor,
    *,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    grad: Tensor | None = None,
    offsets: Tensor | None = None,
    kind: str = "none",
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rows of x (M, K) times rows of the weight (N, K), any strides, with an epilogue.

    With `offsets` the weight is (E, N, K). With `grad` (M, N) it is not the result that is
    returned but the gradient of the product before the epilogue, and that of the second one.
    """
    (rows, depth), columns = x.shape, weight.shape[-2]
    y = x.new_empty((rows, columns)) if out is None else out
    up_grad = y if up is None or grad is None else x.new_empty((rows, columns))
    if up is not None and up.stride() != weight.stride():
        up, weight = up.contiguous(), weight.contiguous()
    w_group, w_row, w_inner = (0, *weight.stride())[-3:]
    count = 0 if offsets is None else len(offsets) - 1

    def grid(constants: dict[str, Any]) -> tuple[int]:
        tile = constants["ROWS"]
        down = tiles(rows, count, tile) if count else triton.cdiv(rows, tile)
        return (down * triton.cdiv(columns, constants["COLUMNS"]),)

    _linear.launch(
        grid,
        *(x, weight, up, bias if bias is None else bias.contiguous(), residual, grad, y, up_grad),
        *(offsets, rows, columns, depth, count, *x.stride(), w_group, w_row, w_inner),
        0 if residual is None else residual.stride(0),
        KIND=kind,
        BACKWARD=grad is not None,
        EVEN=depth % 64 == 0,
        PRECISION=precision(x.dtype),
        PRODUCTS=1 if up is None else 2,
        HELD=1 if residual is None or residual.dtype != torch.float32 else 2,
        GROUP=GROUP,
        shape=(columns, depth),
    )
    return y, up_grad


def _shaped(rows: Tensor, x: Tensor) -> Tensor:
    return rows.view(*x.shape[:-1], rows.shape[-1])


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _forward(kind: str) -> Any:
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _shaped(matmul(_flat(x), weight, bias=bias, kind=kind)[0], x)

    return forward


def linear_residual(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None) -> Tensor:
    """One kernel."""
    return _shaped(matmul(_flat(x), weight, bias=bias, residual=as_rows(residual))[0], x)


def linear_swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """One kernel."""
    return _shaped(matmul(_flat(x), gate_weight, up=up_weight, kind="silu")[0], x)


def _gradients(needs: list[bool], grad: Tensor, x: Tensor, weight: Tensor) -> list[Tensor | None]:
    """Of x, of the weight, of the bias, from that of the product."""
    return [
        _shaped(matmul(grad, weight.T)[0], x) if needs[0] else None,
        matmul(grad.T, _flat(x).T)[0] if needs[1] else None,
        sum_rows(grad, grad.dtype) if needs[2] else None,
    ]


def _backward(kind: str) -> Backward:
    def backward(
        needs: list[bool], grads: list[Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> list[Tensor | None]:
        grad = as_rows(grads[0])
        if kind != "none":
            grad, _ = matmul(_flat(x), weight, bias=bias, grad=grad.contiguous(), kind=kind)
        return _gradients(needs, grad, x, weight)

    return backward


def _residual_backward(
    needs: list[bool],
    grads: list[Tensor],
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Tensor | None,
) -> list[Tensor | None]:
    of_product = [needs[0], needs[1], needs[3]]
    of_x, of_weight, of_bias = _gradients(of_product, as_rows(grads[0]), x, weight)
    return [of_x, of_weight, grads[0], of_bias]


def _swiglu_backward(
    needs: list[bool], grads: list[Tensor], x: Tensor, gate_weight: Tensor, up_weight: Tensor
) -> list[Tensor | None]:
    rows = _flat(x)
    grad = as_rows(grads[0]).contiguous()
    of_gate, of_up = matmul(rows, gate_weight, up=up_weight, grad=grad, kind="silu")
    of_x = None
    if needs[0]:
        through_gate, _ = matmul(of_gate, gate_weight.T)
        of_x = _shaped(matmul(of_up, up_weight.T, residual=through_gate)[0], x)
    return [
        of_x,
        matmul(of_gate.T, rows.T)[0] if needs[1] else None,
        matmul(of_up.T, rows.T)[0] if needs[2] else None,
    ]


def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """One kernel."""
    return matmul(x, weight, offsets=offsets.contiguous())[0]


def grouped_swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor, offsets: Tensor) -> Tensor:
    """One kernel."""
    offsets = offsets.contiguous()
    return matmul(x, gate_weight, up=up_weight, offsets=offsets, kind="silu")[0]


def _of_weights(grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    out = weight.new_empty(weight.shape)
    grad, x = as_rows(grad), as_rows(x)
    groups, columns, depth = weight.shape

    def grid(constants: dict[str, Any]) -> tuple[int, int]:
        down = triton.cdiv(columns, constants["ROWS"])
        return down * triton.cdiv(depth, constants["COLUMNS"]), groups

    _grouped_weight.launch(
        grid,
        *(grad, x, out, offsets, columns, depth, grad.stride(0), x.stride(0)),
        PRECISION=precision(x.dtype),
        PRODUCTS=1,
        GROUP=GROUP,
    )
    return out


def _grouped_backward(
    needs: list[bool], grads: list[Tensor], x: Tensor, weight: Tensor, offsets: Tensor
) -> list[Tensor | None]:
    offsets, grad = offsets.contiguous(), grads[0]
    return [
        matmul(grad, weight.transpose(1, 2), offsets=offsets)[0] if needs[0] else None,
        _of_weights(grad, x, weight, offsets) if needs[1] else None,
        None,
    ]


def _grouped_swiglu_backward(
    needs: list[bool],
    grads: list[Tensor],
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    offsets: Tensor,
) -> list[Tensor | None]:
    offsets = offsets.contiguous()
    of_gate, of_up = matmul(
        x, gate_weight, up=up_weight, grad=grads[0].contiguous(), offsets=offsets, kind="silu"
    )
    of_x = None
    if needs[0]:
        through_gate, _ = matmul(of_gate, gate_weight.transpose(1, 2), offsets=offsets)
        turned = up_weight.transpose(1, 2)
        of_x, _ = matmul(of_up, turned, residual=through_gate, offsets=offsets)
    return [
        of_x,
        _of_weights(of_gate, x, gate_weight, offsets) if needs[1] else None,
        _of_weights(of_up, x, up_weight, offsets) if needs[2] else None,
        None,
    ]


def _fits(x: Tensor, weight: Tensor, *_: object) -> bool:
    return x.numel() > 0 and weight.numel() > 0


def _example(make: Meta) -> tuple[Any, ...]:
    return make(4096, 4096), make(4096, 4096), make(4096)


def _residual_example(make: Meta) -> tuple[Any, ...]:
    return make(4096, 11008), make(4096, 11008), make(4096, 4096), None


def _swiglu_example(make: Meta) -> tuple[Any, ...]:
    return make(4096, 4096), make(11008, 4096), make(11008, 4096)


def _grouped_example(make: Meta) -> tuple[Any, ...]:
    return make(8192, 2048), make(64, 1408, 2048), make.starts(64, 8192)


def _grouped_swiglu_example(make: Meta) -> tuple[Any, ...]:
    x, weight, offsets = _grouped_example(make)
    return x, weight, weight, offsets


for _op, _kind in (
    (ops.linear, "none"),
    (ops.linear_gelu, "gelu"),
    (ops.linear_gelu_tanh, "gelu_tanh"),
    (ops.linear_silu, "silu"),
    (ops.linear_relu, "relu"),
):
    provide(_op, _forward(_kind), example=_example, supports=_fits, backward=_backward(_kind))
provide(
    ops.linear_residual,
    linear_residual,
    example=_residual_example,
    supports=_fits,
    backward=_residual_backward,
)
provide(
    ops.linear_swiglu,
    linear_swiglu,
    example=_swiglu_example,
    supports=_fits,
    backward=_swiglu_backward,
)
# All groups have rows in the example: every weight is read.
_GROUPED = 2 * (8192 * (2048 + 1408) + 64 * 1408 * 2048), 2 * 8192 * 1408 * 2048
provide(
    ops.grouped_linear,
    grouped_linear,
    example=_grouped_example,
    supports=_fits,
    backward=_grouped_backward,
    cost=_GROUPED,
)
provide(
    ops.grouped_swiglu,
    grouped_swiglu,
    example=_grouped_swiglu_example,
    supports=_fits,
    backward=_grouped_swiglu_backward,
    cost=(_GROUPED[0] + 2 * 64 * 1408 * 2048, 2 * _GROUPED[1]),
)
