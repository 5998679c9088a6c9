"""Softmax over the last dimension, scaled and masked.

    softmax(x)_i     = exp(s_i - max s) / sum_j exp(s_j - max s),   s = scale * x
    log_softmax(x)_i = s_i - max s - log sum_j exp(s_j - max s)

`mask` is True for the entries to include. The others get probability 0 (log-probability -inf), even
if a row includes none: attention over no keys is 0, not NaN. An included entry of -inf is different
from an excluded one: if all included entries of a row are -inf, they get NaN, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.arguments import fake_like
from ingot.ops.check import check_same_dtype
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance


def _samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield SampleInput("typical", (make(6, 64), 1.0, None))
    yield SampleInput("large", (make(67, 1031), 1.0, None))
    yield SampleInput("odd", (make(5, 37), 0.125, None))
    yield SampleInput("one_row", (make(1, 48), 1.0, None))
    yield SampleInput("strided", (make.strided(4, 24), 2.0, None))
    # Not so large that a row is one-hot: its gradient would be the remainder of a cancellation.
    yield SampleInput("extreme", (make.spread(4, 33, low=-8, high=1), 1.0, None))
    yield SampleInput("one_column", (make(3, 1), 1.0, None))
    yield SampleInput("masked", (make(5, 19), 0.5, make.bools(5, 19)))
    padded = make.tensor([True] * 9 + [False] * 7, torch.bool)
    yield SampleInput("mask_broadcast", (make(2, 3, 16), 0.5, padded))
    second_row_masked = make.tensor([[True], [False], [True]], torch.bool)
    yield SampleInput("nothing_left", (make(3, 8), 1.0, second_row_masked))


def _check(x: Tensor, scale: float, mask: Tensor | None) -> None:
    check_same_dtype("softmax", x=x)
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise OpError(f"softmax: mask is {mask.dtype}", hint="pass a bool mask")
    dims = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if not (mask.dim() <= x.dim() and all(m in (1, size) for m, size in dims)):
        raise OpError(
            f"softmax: x is {tuple(x.shape)}, mask is {tuple(mask.shape)}",
            hint="pass a mask that broadcasts to x",
        )


def _cost(x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Cost:
    mask_bytes = 0 if mask is None else mask.numel()
    return Cost(bytes=2 * x.nbytes + mask_bytes, flops=5 * x.numel())


_op = op(
    check=_check,
    fake=fake_like,
    samples=_samples,
    tolerance=Tolerance(),
    cost=_cost,
    row_args=("x",),
)


def _shifted_scores(x: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    scores = x * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores - scores.amax(-1, keepdim=True).detach()


@_op
def softmax(x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Return the probabilities of each row.

    >>> softmax(torch.zeros(1, 4), mask=torch.tensor([True, True, False, False]))
    tensor([[0.5000, 0.5000, 0.0000, 0.0000]])
    """
    weights = _shifted_scores(x, scale, mask).exp()
    p = weights / weights.sum(-1, keepdim=True)
    return p if mask is None else p.masked_fill(~mask, 0.0)


@_op
def log_softmax(x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Return the log-probabilities of each row.

    >>> log_softmax(torch.zeros(1, 2))
    tensor([[-0.6931, -0.6931]])
    """
    scores = _shifted_scores(x, scale, mask)
    log_p = scores - scores.exp().sum(-1, keepdim=True).log()
    return log_p if mask is None else log_p.masked_fill(~mask, -torch.inf)
