"""Activations, alone and gated.

    gelu(x)          = x * Phi(x), the normal CDF         Hendrycks & Gimpel 2016
    gelu_tanh(x)     = its tanh approximation             in GPT-2
    silu(x)          = x * sigmoid(x)                     Elfwing et al. 2017
    relu_squared(x)  = max(x, 0)**2                       So et al. 2021
    swiglu(gate, up) = silu(gate) * up                    Shazeer 2020
    geglu(gate, up)  = gelu(gate) * up                    Shazeer 2020

The gated forms take gate and up as two tensors. If one GEMM computes both, they are strided views
of its output, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ingot.ops.arguments import fake_like
from ingot.ops.check import check_same_dtype, check_same_shape
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance


def _samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield SampleInput("typical", (make(6, 64),))
    yield SampleInput("large", (make(67, 1031),))
    yield SampleInput("odd", (make(5, 37),))
    yield SampleInput("one_row", (make(1, 48),))
    yield SampleInput("strided", (make.strided(4, 24),))
    yield SampleInput("extreme", (make.spread(4, 33, low=-12, high=6),))
    yield SampleInput("zero", (make(2, 8) * 0,))


def _gated_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for sample in _samples(make):
        (x,) = sample.args
        yield SampleInput(sample.name, (x, make(*x.shape)))
    yield SampleInput("halves_of_one", make(3, 40).chunk(2, dim=-1))


def _check(x: Tensor) -> None:
    check_same_dtype("activation", x=x)


def _check_gated(gate: Tensor, up: Tensor) -> None:
    check_same_shape("gate and up", gate=gate, up=up)


def _cost(x: Tensor) -> Cost:
    return Cost(bytes=2 * x.nbytes, flops=8 * x.numel())


def _gated_cost(gate: Tensor, up: Tensor) -> Cost:
    return Cost(bytes=3 * gate.nbytes, flops=9 * gate.numel())


_unary = op(
    check=_check,
    fake=fake_like,
    samples=_samples,
    tolerance=Tolerance(),
    cost=_cost,
    row_args=("x",),
)


_gated = op(
    check=_check_gated,
    fake=fake_like,
    samples=_gated_samples,
    tolerance=Tolerance(),
    cost=_gated_cost,
    row_args=("gate", "up"),
)


@_unary
def gelu(x: Tensor) -> Tensor:
    """Apply the Gaussian error linear unit, computed with erf.

    >>> gelu(torch.tensor([[-1.0, 0.0, 1.0]]))
    tensor([[-0.1587,  0.0000,  0.8413]])
    """
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


@_unary
def gelu_tanh(x: Tensor) -> Tensor:
    """Apply the tanh approximation of `gelu`.

    >>> gelu_tanh(torch.tensor([[-1.0, 0.0, 1.0]]))
    tensor([[-0.1588,  0.0000,  0.8412]])
    """
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    return x * torch.sigmoid(2 * inner)


@_unary
def silu(x: Tensor) -> Tensor:
    """Apply the sigmoid linear unit, also called swish.

    >>> silu(torch.tensor([[-1.0, 0.0, 1.0]]))
    tensor([[-0.2689,  0.0000,  0.7311]])
    """
    return x * torch.sigmoid(x)


@_unary
def relu_squared(x: Tensor) -> Tensor:
    """Return the square of the positive part.

    >>> relu_squared(torch.tensor([[-1.0, 0.0, 3.0]]))
    tensor([[0., 0., 9.]])
    """
    return torch.relu(x).square()


@_gated
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`.

    >>> swiglu(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    tensor([[1.4621]])
    """
    return silu.reference(gate) * up


@_gated
def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `gelu(gate) * up`.

    >>> geglu(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    tensor([[1.6827]])
    """
    return gelu.reference(gate) * up


@_gated
def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """Return `gelu_tanh(gate) * up`.

    >>> geglu_tanh(torch.tensor([[1.0]]), torch.tensor([[2.0]]))
    tensor([[1.6824]])
    """
    return gelu_tanh.reference(gate) * up
