"""Embedding: look up a row of the weight for each token."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.check import is_integral
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance


def _samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield SampleInput("typical", (make.ints(50, 16), make(50, 32)))
    yield SampleInput("odd", (make.ints(11, 7), make(11, 13)))
    yield SampleInput("one_row", (make.ints(11, 1), make(11, 13)))
    yield SampleInput("strided", (make.ints(11, 5), make(13, 11).T))
    yield SampleInput("extreme", (make.ints(11, 5), make.spread(11, 9, low=-14, high=12)))
    yield SampleInput("large", (make.ints(103, 67), make(103, 257)))
    yield SampleInput("int32", (make.ints(11, 5, dtype=torch.int32), make(11, 8)))
    yield SampleInput("repeated", (make.tensor([3, 3, 3, 0]), make(5, 8)))
    yield SampleInput("batched", (make.ints(11, 2, 3), make(11, 8)))


def _check(tokens: Tensor, weight: Tensor) -> None:
    if not is_integral(tokens) or tokens.dtype == torch.bool:
        raise OpError(
            f"embedding: tokens are {tokens.dtype}",
            hint="pass token ids in int32 or int64; the weight is the second argument",
        )
    if weight.dim() != 2:
        raise OpError(f"embedding: weight is {tuple(weight.shape)}", hint="pass (V, D)")


def _fake(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((*tokens.shape, weight.shape[1]))


def _cost(tokens: Tensor, weight: Tensor) -> Cost:
    row_bytes = weight.shape[1] * weight.itemsize
    return Cost(bytes=tokens.nbytes + 2 * tokens.numel() * row_bytes, flops=0)


@op(
    check=_check,
    fake=_fake,
    samples=_samples,
    tolerance=Tolerance(),
    cost=_cost,
    row_args=("tokens",),
)
def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return the row of `weight` for each token.

    >>> embedding(torch.tensor([1, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 4.],
            [1., 2.]])
    """
    rows = weight.index_select(0, tokens.flatten())  # unlike weight[tokens], rejects negative ids
    return rows.view(*tokens.shape, weight.shape[1])
