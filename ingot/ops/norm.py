"""Normalization of each row, followed by a learned scale and shift.

    layer_norm(x) = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
    rms_norm(x)   = x / sqrt(mean(x**2) + eps) * weight

by Ba et al. 2016 and Zhang & Sennrich 2019.

A transformer block adds its branch to the residual stream, and the next block normalizes the sum.
The `add_` forms do both in one pass over memory and return the normalized sum and the sum itself,
which is the new residual stream.

`square_sum` is the squared Euclidean norm of each row, of which gradient norms are made.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.arguments import accum_dtype, fake_like
from ingot.ops.check import check_same_dtype, check_same_shape
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance


def _shapes(make: TensorMaker) -> Iterator[tuple[str, Tensor]]:
    yield "typical", make(6, 64)
    yield "large", make(67, 1031)
    yield "odd", make(5, 37)
    yield "one_row", make(1, 48)
    yield "strided", make.strided(4, 24)
    yield "extreme", make.spread(4, 33)
    yield "huge", make(4, 33, scale=5e3)  # the squares overflow float16
    yield "batched", make(2, 3, 16)
    yield "constant", make(3, 16) * 0 + 1.5


def _rms_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for name, x in _shapes(make):
        yield SampleInput(name, (x, make(x.shape[-1]), 1e-5))


def _layer_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for name, x in _shapes(make):
        bias = None if name == "odd" else make(x.shape[-1])
        yield SampleInput(name, (x, make(x.shape[-1]), bias, 1e-5))


def _add_rms_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for sample in _rms_samples(make):
        x, *rest = sample.args
        yield SampleInput(sample.name, (x, make(*x.shape), *rest))


def _add_layer_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for sample in _layer_samples(make):
        x, *rest = sample.args
        yield SampleInput(sample.name, (x, make(*x.shape), *rest))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    if not eps >= 0:
        raise OpError(f"norm: eps is {eps}", hint="pass 0 or more, usually 1e-5")
    check_same_dtype("norm", x=x, weight=weight, bias=bias)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and vector.shape != x.shape[-1:]:
            raise OpError(
                f"norm: x has {x.shape[-1]} channels, {name} is {tuple(vector.shape)}",
                hint=f"pass a {name} with one value for each channel",
            )


def _check_rms(x: Tensor, weight: Tensor, eps: float) -> None:
    _check(x, weight, None, eps)


def _check_layer(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> None:
    _check(x, weight, bias, eps)


def _check_add_rms(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    check_same_shape("add_rms_norm", x=x, residual=residual)
    _check(x, weight, None, eps)


def _check_add_layer(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> None:
    check_same_shape("add_layer_norm", x=x, residual=residual)
    _check(x, weight, bias, eps)


def _rms_cost(x: Tensor, weight: Tensor, *_: object) -> Cost:
    return Cost(bytes=2 * x.nbytes + weight.nbytes, flops=4 * x.numel())


def _layer_cost(x: Tensor, weight: Tensor, bias: Tensor | None = None, *_: object) -> Cost:
    vectors = weight.nbytes if bias is None else 2 * weight.nbytes
    return Cost(bytes=2 * x.nbytes + vectors, flops=7 * x.numel())


def _add_rms_cost(x: Tensor, residual: Tensor, weight: Tensor, *_: object) -> Cost:
    return Cost(bytes=4 * x.nbytes + weight.nbytes, flops=5 * x.numel())


def _add_layer_cost(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, *_: object
) -> Cost:
    vectors = weight.nbytes if bias is None else 2 * weight.nbytes
    return Cost(bytes=4 * x.nbytes + vectors, flops=8 * x.numel())


def _square_sum_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for name, x in _shapes(make):
        yield SampleInput(name, (x,))


def _check_square_sum(x: Tensor) -> None:
    check_same_dtype("square_sum", x=x)
    if not x.dim():
        raise OpError("square_sum: x has no dimension", hint="pass x.view(1)")


def _fake_square_sum(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=accum_dtype(x.dtype))


def _square_sum_cost(x: Tensor) -> Cost:
    return Cost(bytes=x.nbytes + 4 * x.shape[:-1].numel(), flops=2 * x.numel())


def _twice(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return fake_like(x), fake_like(x)


@op(
    check=_check_rms,
    fake=fake_like,
    samples=_rms_samples,
    tolerance=Tolerance(),
    cost=_rms_cost,
    row_args=("x",),
)
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale each row to unit root mean square, then by `weight`.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@op(
    check=_check_layer,
    fake=fake_like,
    samples=_layer_samples,
    tolerance=Tolerance(),
    cost=_layer_cost,
    row_args=("x",),
)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Shift each row to mean 0, scale it to variance 1, then by `weight` and `bias`.

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), torch.ones(2), eps=0.0)
    tensor([[-1.,  1.]])
    """
    centered = x - x.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias


@op(
    check=_check_add_rms,
    fake=_twice,
    samples=_add_rms_samples,
    tolerance=Tolerance(),
    cost=_add_rms_cost,
    row_args=("x", "residual"),
)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm` of `x + residual`, and the sum.

    >>> y, total = add_rms_norm(torch.ones(1, 2), torch.ones(1, 2), torch.ones(2), eps=0.0)
    >>> y, total
    (tensor([[1., 1.]]), tensor([[2., 2.]]))
    """
    total = x + residual
    return rms_norm.reference(total, weight, eps), total


@op(
    check=_check_add_layer,
    fake=_twice,
    samples=_add_layer_samples,
    tolerance=Tolerance(),
    cost=_add_layer_cost,
    row_args=("x", "residual"),
)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return `layer_norm` of `x + residual`, and the sum.

    >>> y, total = add_layer_norm(torch.eye(2), torch.eye(2), torch.ones(2), eps=0.0)
    >>> y
    tensor([[ 1., -1.],
            [-1.,  1.]])
    """
    total = x + residual
    return layer_norm.reference(total, weight, bias, eps), total


@op(
    check=_check_square_sum,
    fake=_fake_square_sum,
    samples=_square_sum_samples,
    tolerance=Tolerance(),
    cost=_square_sum_cost,
    row_args=("x",),
)
def square_sum(x: Tensor) -> Tensor:
    """Return the sum of the squares of each row, in float32.

    >>> square_sum(torch.tensor([[3.0, 4.0], [1.0, 0.0]]))
    tensor([25.,  1.])
    """
    return x.to(accum_dtype(x.dtype)).square().sum(-1)
