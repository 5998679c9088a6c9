"""`activation` on GPUs: elementwise, one load and one store per element.

The backward pass recomputes the activation instead of storing it: it is bandwidth-bound.
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

_BLOCK = 2048


def _space(target: TargetSpec, BLOCK: int, **_: object) -> Iterator[KernelConfig]:
    yield from elementwise_space(target, BLOCK)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Apply the named activation to float32 values."""
    if ACTIVATION == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    elif ACTIVATION == "relu_squared":
        y = tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "none")
        y = x
    return y


@triton.jit
def activation_grad(x, ACTIVATION: tl.constexpr):
    """Return the derivative of the named activation."""
    if ACTIVATION == "gelu":
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        y = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * density
    elif ACTIVATION == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = s + x * s * (1 - s) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    elif ACTIVATION == "silu":
        s = tl.sigmoid(x)
        y = s + x * s * (1 - s)
    elif ACTIVATION == "relu":
        y = tl.where(x > 0, 1.0, 0.0)
    elif ACTIVATION == "relu_squared":
        y = 2 * tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "none")
        y = x * 0 + 1
    return y


@kernel(space=_space, bound_by="bandwidth")
@triton.jit
def _activation(
    gate, up, y, N, stride_gate, stride_up, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Activate a block of a row, and multiply it by `up` if given."""
    row = tl.program_id(1).to(tl.int64)
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_n < N
    value = activate(tl.load(gate + row * stride_gate + offs_n, mask).to(tl.float32), ACTIVATION)
    if up is not None:
        value *= tl.load(up + row * stride_up + offs_n, mask).to(tl.float32)
    tl.store(y + row * N + offs_n, value.to(y.dtype.element_ty), mask)


@kernel(space=_space, bound_by="bandwidth")
@triton.jit
def _activation_backward(
    gate, up, grad_output, grad_gate, grad_up, N, stride_gate, stride_up,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of a row."""
    row = tl.program_id(1).to(tl.int64)
    offs_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_n < N
    offs = row * N + offs_n
    x = tl.load(gate + row * stride_gate + offs_n, mask).to(tl.float32)
    grad = tl.load(grad_output + offs, mask).to(tl.float32)
    if up is not None:
        grad_up_tile = grad * activate(x, ACTIVATION)
        tl.store(grad_up + offs, grad_up_tile.to(grad_up.dtype.element_ty), mask)
        grad *= tl.load(up + row * stride_up + offs_n, mask).to(tl.float32)
    grad_gate_tile = grad * activation_grad(x, ACTIVATION)
    tl.store(grad_gate + offs, grad_gate_tile.to(grad_gate.dtype.element_ty), mask)


def _flat(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the inputs as 2D: one long row if all are contiguous, else rows."""
    tensors = [t for t in (gate, up) if t is not None]
    if all(t.is_contiguous() for t in tensors):
        flat = [t.view(1, -1) for t in tensors]
    else:
        flat = [as_rows(t) for t in tensors]
    return flat[0], flat[1] if up is not None else None


def _grid(gate: Tensor) -> tuple[int, int]:
    return triton.cdiv(gate.shape[1], _BLOCK), gate.shape[0]


def _forward(activation: str) -> Any:
    def forward(gate: Tensor, up: Tensor | None = None) -> Tensor:
        y = gate.new_empty(gate.shape)
        gate, up = _flat(gate, up)
        strides = gate.stride(0), 0 if up is None else up.stride(0)
        _activation.launch(
            _grid(gate), gate, up, y, gate.shape[1], *strides, ACTIVATION=activation, BLOCK=_BLOCK
        )
        return y

    return forward


def _backward(activation: str) -> Backward:
    def backward(
        needs: list[bool], grads: list[Tensor], gate: Tensor, up: Tensor | None = None
    ) -> list[Tensor | None]:
        grad_gate = gate.new_empty(gate.shape)
        grad_up = None if up is None else up.new_empty(up.shape)
        gate, up = _flat(gate, up)
        strides = gate.stride(0), 0 if up is None else up.stride(0)
        _activation_backward.launch(
            _grid(gate),
            *(gate, up, grads[0].contiguous(), grad_gate, grad_up, gate.shape[1], *strides),
            ACTIVATION=activation,
            BLOCK=_BLOCK,
        )
        return [grad_gate] if grad_up is None else [grad_gate, grad_up]

    return backward


def _supported(gate: Tensor, up: Tensor | None = None) -> bool:
    """Rows are axis 1 of the grid, which is limited to 65535; contiguous inputs are one row."""
    if not gate.numel():
        return False
    return _flat(gate, up)[0].shape[0] < 65536


def _unary(make: ExampleInputs) -> tuple[Any, ...]:
    return (make(8192, 11008),)


def _gated(make: ExampleInputs) -> tuple[Any, ...]:
    return make(8192, 11008), make(8192, 11008)


for _op, _activation_name in (
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
        _forward(_activation_name),
        example=_gated if "up" in _op.signature.parameters else _unary,
        supports=_supported,
        backward=_backward(_activation_name),
    )
