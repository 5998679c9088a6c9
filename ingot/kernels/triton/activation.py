"""`activation` on GPUs: every element by itself.

Backward computes what it needs of the forward again: it is bound by memory.
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

_TILE = 2048


def _space(target: Target, TILE: int, **_: object) -> Iterator[Config]:
    yield from by_elements(target, TILE)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """The activation of that name, of float32."""
    if KIND == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "silu":
        y = x * tl.sigmoid(x)
    elif KIND == "relu":
        y = tl.maximum(x, 0.0)
    elif KIND == "relu_squared":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        tl.static_assert(KIND == "none")
        y = x
    return y


@triton.jit
def derivative(x, KIND: tl.constexpr):
    """Its derivative."""
    if KIND == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        y = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * density
    elif KIND == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    elif KIND == "silu":
        s = tl.sigmoid(x)
        y = s + x * s * (1 - s)
    elif KIND == "relu":
        y = tl.where(x > 0, 1.0, 0.0)
    elif KIND == "relu_squared":
        y = 2 * tl.maximum(x, 0.0)
    else:
        tl.static_assert(KIND == "none")
        y = x * 0 + 1
    return y


@kernel(space=_space, bound="bandwidth")
@triton.jit
def _activation(
    gate, up, y, width, gate_row, up_row, KIND: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Activate a piece of a row, and multiply it by `up` if there is one."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = column < width
    value = activate(tl.load(gate + row * gate_row + column, inside).to(tl.float32), KIND)
    if up is not None:
        value *= tl.load(up + row * up_row + column, inside).to(tl.float32)
    tl.store(y + row * width + column, value.to(y.dtype.element_ty), inside)


@kernel(space=_space, bound="bandwidth")
@triton.jit
def _activation_backward(
    gate, up, grad, gate_grad, up_grad, width, gate_row, up_row,
    KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradients of a piece of a row."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = column < width
    at = row * width + column
    x = tl.load(gate + row * gate_row + column, inside).to(tl.float32)
    given = tl.load(grad + at, inside).to(tl.float32)
    if up is not None:
        of_up = given * activate(x, KIND)
        tl.store(up_grad + at, of_up.to(up_grad.dtype.element_ty), inside)
        given *= tl.load(up + row * up_row + column, inside).to(tl.float32)
    of_gate = given * derivative(x, KIND)
    tl.store(gate_grad + at, of_gate.to(gate_grad.dtype.element_ty), inside)


def _flat(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """As rows; as one long row where nothing lies between them."""
    tensors = [t for t in (gate, up) if t is not None]
    if all(t.is_contiguous() for t in tensors):
        flat = [t.view(1, -1) for t in tensors]
    else:
        flat = [as_rows(t) for t in tensors]
    return flat[0], flat[1] if up is not None else None


def _grid(gate: Tensor) -> tuple[int, int]:
    return triton.cdiv(gate.shape[1], _TILE), gate.shape[0]


def _forward(kind: str) -> Any:
    def forward(gate: Tensor, up: Tensor | None = None) -> Tensor:
        y = gate.new_empty(gate.shape)
        gate, up = _flat(gate, up)
        strides = gate.stride(0), 0 if up is None else up.stride(0)
        _activation.launch(_grid(gate), gate, up, y, gate.shape[1], *strides, KIND=kind, TILE=_TILE)
        return y

    return forward


def _backward(kind: str) -> Backward:
    def backward(
        needs: list[bool], grads: list[Tensor], gate: Tensor, up: Tensor | None = None
    ) -> list[Tensor | None]:
        of_gate = gate.new_empty(gate.shape)
        of_up = None if up is None else up.new_empty(up.shape)
        gate, up = _flat(gate, up)
        strides = gate.stride(0), 0 if up is None else up.stride(0)
        _activation_backward.launch(
            _grid(gate),
            *(gate, up, grads[0].contiguous(), of_gate, of_up, gate.shape[1], *strides),
            KIND=kind,
            TILE=_TILE,
        )
        return [of_gate] if of_up is None else [of_gate, of_up]

    return backward


def _fits(gate: Tensor, up: Tensor | None = None) -> bool:
    """Rows are an axis of the grid, which ends at 65535; there is one where all is contiguous."""
    if not gate.numel():
        return False
    return _flat(gate, up)[0].shape[0] < 65536


def _unary(make: Meta) -> tuple[Any, ...]:
    return (make(8192, 11008),)


def _gated(make: Meta) -> tuple[Any, ...]:
    return make(8192, 11008), make(8192, 11008)


for _op, _kind in (
    (ops.gelu, "gelu"),
    (ops.gelu_tanh, "gelu_tanh"),
    (ops.silu, "silu"),
    (ops.relu_squared, "relu_squared"),
    (ops.geglu, "gelu"),
    (ops.geglu_tanh, "gelu_tanh"),
    (ops.swiglu, "silu"),
):
    provide(
        _op,
        _forward(_kind),
        example=_gated if "up" in _op.signature.parameters else _unary,
        supports=_fits,
        backward=_backward(_kind),
    )
