"""Matrix product with a weight, and what is fused into its last step.

    linear(x)          = x W^T + b
    linear_gelu(x)     = gelu(x W^T + b),   likewise gelu_tanh, silu, relu
    linear_swiglu(x)   = silu(x G^T) * (x U^T): gate and up, as one pass over x
    linear_residual(x) = residual + x W^T + b
    grouped_linear(x)  = x W_e^T, e being the group that a row is in: a mixture of experts
    grouped_swiglu(x)  = linear_swiglu with the gate and up of that group

The epilogues work on the accumulator before it is rounded and stored, so a fused op moves
the intermediate neither out nor in and rounds once where two ops round twice.

Weights are (out, in) as `torch.nn.Linear` has them; of groups, (E, out, in). The rows of a group
lie side by side: those of group e are `offsets[e]` up to `offsets[e + 1]`.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops import activation
from ingot.ops.check import check_same_dtype, check_same_shape
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import Cost, Tolerance, op


def _samples(make: TensorMaker) -> Iterator[SampleInput]:
    def weight(out: int, width: int) -> Tensor:
        return make(out, width, scale=width**-0.5)

    yield SampleInput("typical", (make(6, 64), weight(48, 64), make(48)))
    yield SampleInput("large", (make(67, 259), weight(131, 259), make(131)))
    yield SampleInput("odd", (make(5, 37), weight(19, 37), None))
    yield SampleInput("one_row", (make(1, 48), weight(32, 48), make(32)))
    yield SampleInput("strided", (make.strided(4, 24), weight(24, 17).T, make(17)))
    yield SampleInput("extreme", (make.spread(4, 33), weight(9, 33), make(9)))
    yield SampleInput("batched", (make(2, 3, 16), weight(8, 16), None))
    yield SampleInput("vector", (make(16), weight(8, 16), make(8)))
    # Positive: a lone result that cancelled would have no row to be small against.
    yield SampleInput("one_column", (make(3, 8).abs(), weight(1, 8).abs(), make(1).abs()))


def _swiglu_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for sample in _samples(make):
        x, weight, _ = sample.args
        up_weight = make(*weight.shape, scale=x.shape[-1] ** -0.5)
        yield SampleInput(
            sample.name, (x, weight, up_weight.abs() if len(weight) == 1 else up_weight)
        )


def _residual_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for sample in _samples(make):
        x, weight, bias = sample.args
        yield SampleInput(sample.name, (x, weight, make(*x.shape[:-1], weight.shape[0]), bias))


def _grouped_samples(make: TensorMaker) -> Iterator[SampleInput]:
    def grouped(name: str, x: Tensor, out: int, *ends: int) -> SampleInput:
        weight = make(len(ends), out, x.shape[1], scale=x.shape[1] ** -0.5)
        return SampleInput(name, (x, weight, make.tensor([0, *ends])))

    yield grouped("typical", make(6, 64), 48, 2, 5, 6)
    yield grouped("large", make(67, 259), 131, 40, 41, 67)
    yield grouped("odd", make(5, 37), 19, 0, 3, 3, 5)
    yield grouped("one_row", make(1, 48), 32, 0, 1)
    x, weight, offsets = grouped("strided", make.strided(4, 24), 17, 3, 4).args
    yield SampleInput("strided", (x, weight.transpose(0, 1).contiguous().transpose(0, 1), offsets))
    yield grouped("extreme", make.spread(4, 33), 9, 1, 4)
    x, weight, offsets = grouped("int32", make(4, 16), 8, 2, 4).args
    yield SampleInput("int32", (x, weight, offsets.int()))


def _grouped_swiglu_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for sample in _grouped_samples(make):
        x, weight, offsets = sample.args
        up_weight = make(*weight.shape, scale=x.shape[-1] ** -0.5)
        yield SampleInput(sample.name, (x, weight, up_weight, offsets))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    check_same_dtype("linear", x=x, weight=weight, bias=bias)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise OpError(
            f"linear: x has {x.shape[-1]} channels, weight is {tuple(weight.shape)}",
            hint="give a weight of (out, in), in being x's channels",
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise OpError(
            f"linear: weight is {tuple(weight.shape)}, bias does not have one value a row",
            hint="give a bias of (out,)",
        )


def _check_swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor) -> None:
    check_same_shape("linear_swiglu", gate_weight=gate_weight, up_weight=up_weight)
    _check(x, gate_weight)


def _check_residual(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None) -> None:
    _check(x, weight, bias)
    check_same_dtype("linear_residual", x=x, residual=residual)
    shape = (*x.shape[:-1], weight.shape[0])
    if residual.shape != shape:
        raise OpError(
            f"linear_residual: residual is {tuple(residual.shape)}, the product {shape}",
            hint="give a residual of the product's shape; ops do not broadcast",
        )


def _check_grouped(x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    check_same_dtype("grouped", x=x, weight=weight)
    if not (x.dim() == 2 and weight.dim() == 3 and weight.shape[2] == x.shape[1]):
        raise OpError(
            f"grouped: x is {tuple(x.shape)}, weight {tuple(weight.shape)}",
            hint="give x as (rows, in) and a weight of (groups, out, in)",
        )
    if offsets.shape != (len(weight) + 1,) or offsets.is_floating_point():
        raise OpError(
            f"grouped: {len(weight)} groups, but offsets {offsets.dtype} {tuple(offsets.shape)}",
            hint="give integers, one more than there are groups",
        )


def _check_grouped_swiglu(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, offsets: Tensor
) -> None:
    check_same_shape("grouped_swiglu", gate_weight=gate_weight, up_weight=up_weight)
    _check_grouped(x, gate_weight, offsets)


def _groups(x: Tensor, offsets: Tensor) -> list[tuple[int, Tensor]]:
    """The groups that have rows, with their rows."""
    ends: list[int] = offsets.tolist()
    if not (ends[0] == 0 and ends[-1] == len(x) and ends == sorted(ends)):
        raise OpError(
            f"grouped: offsets are {ends[:8]} for {len(x)} rows",
            hint="give where each group begins: 0 first, the number of rows last",
        )
    return [(e, x[a:b]) for e, (a, b) in enumerate(pairwise(ends)) if a < b]


def _fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _grouped_fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


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


def _grouped_cost(x: Tensor, weight: Tensor, offsets: Tensor) -> Cost:
    result = len(x) * weight.shape[1] * x.itemsize
    read = len(_groups(x, offsets)) * weight[0].nbytes
    return Cost(bytes=x.nbytes + read + result, flops=2 * len(x) * weight[0].numel())


def _grouped_swiglu_cost(
    x: Tensor, gate_weight: Tensor, up_weight: Tensor, offsets: Tensor
) -> Cost:
    one = _grouped_cost(x, gate_weight, offsets)
    read = len(_groups(x, offsets)) * up_weight[0].nbytes
    return Cost(bytes=one.bytes + read, flops=2 * one.flops)


_with_bias = op(
    check=_check,
    fake=_fake,
    samples=_samples,
    tolerance=Tolerance(),
    cost=_cost,
    row_args=("x",),
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
    row_args=("x",),
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
    row_args=("x", "residual"),
)
def linear_residual(
    x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`residual + linear(x, weight, bias)`.

    >>> linear_residual(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1))
    tensor([[2.]])
    """
    return residual + linear.reference(x, weight, bias)


@op(
    check=_check_grouped,
    fake=_grouped_fake,
    samples=_grouped_samples,
    tolerance=Tolerance(),
    cost=_grouped_cost,
    row_args=(),
)
def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows (T, in), each by the weight of its group out of (E, out, in); offsets (E + 1).

    >>> weight = torch.tensor([[[1.0]], [[2.0]]])
    >>> grouped_linear(torch.ones(3, 1), weight, torch.tensor([0, 1, 3])).T
    tensor([[1., 2., 2.]])
    """
    parts = [rows @ weight[e].T for e, rows in _groups(x, offsets)]
    return torch.cat([x[:0] @ weight[0].T, *parts])


@op(
    check=_check_grouped_swiglu,
    fake=_grouped_fake,
    samples=_grouped_swiglu_samples,
    tolerance=Tolerance(),
    cost=_grouped_swiglu_cost,
    row_args=(),
)
def grouped_swiglu(x: Tensor, gate_weight: Tensor, up_weight: Tensor, offsets: Tensor) -> Tensor:
    """`swiglu(grouped_linear(x, gate_weight, offsets), grouped_linear(x, up_weight, offsets))`.

    >>> weight, offsets = torch.ones(2, 1, 1), torch.tensor([0, 1, 1])
    >>> grouped_swiglu(torch.ones(1, 1), weight, weight, offsets)
    tensor([[0.7311]])
    """
    gate = grouped_linear.reference(x, gate_weight, offsets)
    return activation.swiglu.reference(gate, grouped_linear.reference(x, up_weight, offsets))
