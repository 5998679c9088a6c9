"""Matrix product with a weight, and what is fused into its last step.

    linear(x)          = x W^T + b
    linear_gelu(x)     = gelu(x W^T + b),   likewise gelu_tanh, silu, relu
    linear_swiglu(x)   = silu(x G^T) * (x U^T): gate and up, as one pass over x
    linear_residual(x) = residual + x W^T + b

The epilogues work on the accumulator before it is rounded and stored, so a fused op moves
the intermediate neither out nor in and rounds once where two ops round twice.

Weights are (out, in) as `torch.nn.Linear` has them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops import activation
from ingot.ops.check import same_dtype, same_shape
from ingot.ops.inputs import Make, Sample
from ingot.ops.op import Cost, Tolerance, op


def _samples(make: Make) -> Iterator[Sample]:
    def weight(out: int, width: int) -> Tensor:
        return make(out, width, scale=width**-0.5)

    yield Sample("typical", (make(6, 64), weight(48, 64), make(48)))
    yield Sample("large", (make(67, 259), weight(131, 259), make(131)))
    yield Sample("odd", (make(5, 37), weight(19, 37), None))
    yield Sample("one_row", (make(1, 48), weight(32, 48), make(32)))
    yield Sample("strided", (make.strided(4, 24), weight(24, 17).T, make(17)))
    yield Sample("extreme", (make.spread(4, 33), weight(9, 33), make(9)))
    yield Sample("batched", (make(2, 3, 16), weight(8, 16), None))
    yield Sample("vector", (make(16), weight(8, 16), make(8)))
    # Positive: a lone result that cancelled would have no row to be small against.
    yield Sample("one_column", (make(3, 8).abs(), weight(1, 8).abs(), make(1).abs()))


def _swiglu_samples(make: Make) -> Iterator[Sample]:
    for sample in _samples(make):
        x, weight, _ = sample.args
        up_weight = make(*weight.shape, scale=x.shape[-1] ** -0.5)
        yield Sample(sample.name, (x, weight, up_weight.abs() if len(weight) == 1 else up_weight))


def _residual_samples(make: Make) -> Iterator[Sample]:
    for sample in _samples(make):
        x, weight, bias = sample.args
        yield Sample(sample.name, (x, weight, make(*x.shape[:-1], weight.shape[0]), bias))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    same_dtype("linear", x=x, weight=weight, bias=bias)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise OpError(
            f"linear: x has {x.shape[-1]} channels, weight is {tuple(weight.shape)}",
            remedy="give a weight of (out, in), in being x's channels",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise OpError(
            f"linear: weight is {tuple(weight.shape)}, bias does not have one value a row",
            remedy="give a bias of (out,)",
        )


def _check_swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> None:
    same_shape("linear_swiglu", gate_weight=gate_weight, up_weight=up_weight)
    _check(x, gate_weight)


def _check_residual(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None) -> None:
    _check(x, weight, bias)
    same_dtype("linear_residual", x=x, residual=residual)
    shape = (*x.shape[:-1], weight.shape[0])
    if residual.shape != shape:
        raise OpError(
            f"linear_residual: residual is {tuple(residual.shape)}, the product {shape}",
            remedy="give a residual of the product's shape; ops do not broadcast",
        )


def _fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _cost(x: Tensor, weight: Tensor, *_: object) -> Cost:
    rows = _rows(x)
    result = rows * weight.shape[0] * x.itemsize
    return Cost(bytes=x.nbytes + weight.nbytes + result, flops=2 * rows * weight.numel())


def _swiglu_cost(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Cost:
    rows = _rows(x)
    result = rows * up_weight.shape[0] * x.itemsize
    return Cost(bytes=x.nbytes + 2 * up_weight.nbytes + result, flops=4 * rows * up_weight.numel())


def _residual_cost(x: Tensor, weight: Tensor, residual: Tensor, *_: object) -> Cost:
    rows = _rows(x)
    result = residual.nbytes
    return Cost(bytes=x.nbytes + weight.nbytes + 2 * result, flops=2 * rows * weight.numel())


_with_bias = op(
    check=_check,
    fake=_fake,
    samples=_samples,
    tolerance=Tolerance(),
    cost=_cost,
    rows=("x",),
)


@_with_bias
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`.

    >>> linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([[11.]])
    """
    y = x @ weight.T
    return y if bias is None else y + bias


@_with_bias
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`gelu(linear(x, weight, bias))`.

    >>> linear_gelu(torch.ones(1, 1), torch.ones(1, 1))
    tensor([[0.8413]])
    """
    return activation.gelu.reference(linear.reference(x, weight, bias))


@_with_bias
def linear_gelu_tanh(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`gelu_tanh(linear(x, weight, bias))`.

    >>> linear_gelu_tanh(torch.ones(1, 1), torch.ones(1, 1))
    tensor([[0.8412]])
    """
    return activation.gelu_tanh.reference(linear.reference(x, weight, bias))


@_with_bias
def linear_silu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`silu(linear(x, weight, bias))`.

    >>> linear_silu(torch.ones(1, 1), torch.ones(1, 1))
    tensor([[0.7311]])
    """
    return activation.silu.reference(linear.reference(x, weight, bias))


@_with_bias
def linear_relu(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`relu(linear(x, weight, bias))`.

    >>> linear_relu(torch.ones(1, 1), -torch.ones(1, 1))
    tensor([[0.]])
    """
    return torch.relu(linear.reference(x, weight, bias))


@op(
    check=_check_swiglu,
    fake=_fake,
    samples=_swiglu_samples,
    tolerance=Tolerance(),
    cost=_swiglu_cost,
    rows=("x",),
)
def linear_swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> Tensor:
    """`swiglu(linear(x, gate_weight), linear(x, up_weight))`.

    >>> linear_swiglu(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1))
    tensor([[0.7311]])
    """
    return activation.swiglu.reference(x @ gate_weight.T, x @ up_weight.T)


@op(
    check=_check_residual,
    fake=_fake,
    samples=_residual_samples,
    tolerance=Tolerance(),
    cost=_residual_cost,
    rows=("x", "residual"),
)
def linear_residual(
    x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`residual + linear(x, weight, bias)`.

    >>> linear_residual(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1))
    tensor([[2.]])
    """
    return residual + linear.reference(x, weight, bias)
