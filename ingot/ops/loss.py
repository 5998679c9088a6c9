"""Losses over a vocabulary, one value per token.

With z the logits of a token, t its target and lse = log sum exp z:

    token_logprobs = z_t - lse
    cross_entropy  = lse - (1 - e) z_t - e mean(z) + c lse**2

e is label smoothing and c the weight of the z-loss that keeps lse near 0 (Chowdhery et al.
2022). Tokens whose target is `ignore_index` have a loss of 0. Losses are not averaged: masks,
weights and metrics need them per token.

The `linear_` forms take the hidden states and the weight of the LM head instead of logits and
process the tokens in chunks: with 4096 tokens and a vocabulary of 49152, the logits of a batch
would take 805 MB in float32, those of a chunk 50 MB.

Results are in float32 (float64 for float64 inputs): in bfloat16 a loss of 8 has steps of 1/32.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.arguments import accum_dtype
from ingot.ops.check import check_same_dtype, is_integral
from ingot.ops.gradient import Backward, differentiate
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.linear import linear
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance

CHUNK = 256  # tokens whose logits are in memory at a time


def by_chunks(forward: Callable[..., Any]) -> Backward:
    """Return the backward of a `linear_` loss, which processes the tokens in chunks."""
    backward = differentiate(forward)

    def chunked(needs: list[bool], grads: list[Tensor], *args: Any) -> list[Tensor | None]:
        hidden, weight, targets, *options = args
        # Accumulate the weight gradient in float32 and round it once, at the end.
        weight = weight.to(accum_dtype(weight.dtype))
        hidden_grad, weight_grad = torch.zeros_like(hidden), torch.zeros_like(weight)
        for total, h, t, g in _chunks(hidden_grad, hidden, targets, grads[0]):
            dhidden, dweight, *_ = backward(needs, [g], h, weight, t, *options)
            total += 0 if dhidden is None else dhidden
            weight_grad += 0 if dweight is None else dweight
        return [hidden_grad, weight_grad.to(args[1].dtype), *(None for _ in args[2:])]

    return chunked


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(CHUNK) for tensor in tensors), strict=True)


# Samples of options of the loss: ignore_index, label_smoothing, z_loss.
_LOSS_ONLY = {
    "ignored": (-100, 0.0, 0.0),
    "other_ignored": (7, 0.0, 0.0),
    "smooth": (-100, 0.1, 0.0),
    "smooth_z": (-100, 0.1, 1e-3),
}


def _rows(make: TensorMaker) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield name, rows and targets; the rows are logits or hidden states."""
    yield "typical", make(6, 64), make.ints(11, 6)
    yield "large", make(67, 1031), make.ints(11, 67)
    yield "odd", make(5, 37), make.ints(11, 5)
    yield "one_row", make(1, 48), make.ints(11, 1)
    yield "strided", make.strided(4, 24), make.ints(11, 4)
    yield "extreme", make.spread(4, 33, high=6), make.ints(11, 4)
    yield "ignored", make(4, 16), make.tensor([3, -100, 0, -100])
    yield "other_ignored", make(4, 16), make.tensor([3, 7, 0, 7])
    yield "smooth", make(4, 16), make.ints(11, 4)
    yield "smooth_z", make(4, 16), make.ints(11, 4)
    yield "int32", make(4, 16), make.ints(11, 4, dtype=torch.int32)


def _logprob_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for name, logits, targets in _rows(make):
        if name not in _LOSS_ONLY:
            yield SampleInput(name, (logits, targets))


def _loss_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for name, logits, targets in _rows(make):
        yield SampleInput(name, (logits, targets, *_LOSS_ONLY.get(name, (-100, 0.0, 0.0))))


def _with_weight(make: TensorMaker, samples: Iterator[SampleInput]) -> Iterator[SampleInput]:
    for sample in samples:
        hidden, targets, *options = sample.args
        weight = make(11, hidden.shape[-1], scale=hidden.shape[-1] ** -0.5)
        yield SampleInput(sample.name, (hidden, weight, targets, *options))
    rows = CHUNK + 3
    yield SampleInput("chunks", (make(rows, 5), make(11, 5), make.ints(11, rows)))


def _linear_logprob_samples(make: TensorMaker) -> Iterator[SampleInput]:
    return _with_weight(make, _logprob_samples(make))


def _linear_loss_samples(make: TensorMaker) -> Iterator[SampleInput]:
    return _with_weight(make, _loss_samples(make))


def _check(logits: Tensor, targets: Tensor, *_: object) -> None:
    check_same_dtype("loss", rows=logits)
    if targets.shape != logits.shape[:-1] or not is_integral(targets):
        raise OpError(
            f"loss: rows are {tuple(logits.shape)}, targets {targets.dtype} {tuple(targets.shape)}",
            hint="pass one token id for each row",
        )


def _check_linear(hidden: Tensor, weight: Tensor, targets: Tensor, *_: object) -> None:
    _check(hidden, targets)
    _check_head(hidden, weight)


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing <= 1:
        raise OpError(
            f"loss: label_smoothing must be from 0 to 1, got {label_smoothing}",
            hint="0.1 is usual; 0 for none",
        )


def _check_loss(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, *_: object
) -> None:
    _check(logits, targets)
    _check_smoothing(label_smoothing)


def _check_linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    label_smoothing: float,
    *_: object,
) -> None:
    _check_linear(hidden, weight, targets)
    _check_smoothing(label_smoothing)


def _check_head(hidden: Tensor, weight: Tensor) -> None:
    check_same_dtype("loss", hidden=hidden, weight=weight)
    if not (hidden.dim() == 2 and weight.dim() == 2 and weight.shape[1] == hidden.shape[1]):
        raise OpError(
            f"loss: hidden is {tuple(hidden.shape)}, weight {tuple(weight.shape)}",
            hint="pass hidden as (tokens, channels) and weight as (vocabulary, channels)",
        )


def _fake(logits: Tensor, targets: Tensor, *_: object) -> Tensor:
    return logits.new_empty(targets.shape, dtype=accum_dtype(logits.dtype))


def _linear_fake(hidden: Tensor, weight: Tensor, targets: Tensor, *_: object) -> Tensor:
    return _fake(hidden, targets)


def _cost(logits: Tensor, targets: Tensor, *_: object) -> Cost:
    tokens = targets.numel()
    return Cost(bytes=logits.nbytes + targets.nbytes + 4 * tokens, flops=4 * logits.numel())


def _linear_cost(hidden: Tensor, weight: Tensor, targets: Tensor, *_: object) -> Cost:
    tokens, vocabulary = targets.numel(), weight.shape[0]
    return Cost(
        bytes=hidden.nbytes + weight.nbytes + targets.nbytes + 4 * tokens,
        flops=2 * tokens * weight.numel() + 4 * tokens * vocabulary,
    )


@op(
    check=_check,
    fake=_fake,
    samples=_logprob_samples,
    tolerance=Tolerance(),
    cost=_cost,
    row_args=("logits", "targets"),
)
def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability (T) of each target, from logits (T, V) and targets (T).

    >>> token_logprobs(torch.zeros(1, 2), torch.tensor([0]))
    tensor([-0.6931])
    """
    chosen = logits.gather(-1, targets.long()[..., None]).squeeze(-1)
    return chosen - logits.logsumexp(-1)


@op(
    check=_check_loss,
    fake=_fake,
    samples=_loss_samples,
    tolerance=Tolerance(),
    cost=_cost,
    row_args=("logits", "targets"),
)
def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the loss (T) of each token, from logits (T, V) and targets (T).

    >>> cross_entropy(torch.zeros(2, 2), torch.tensor([0, -100]))
    tensor([0.6931, 0.0000])
    """
    ignored = targets == ignore_index
    lse = logits.logsumexp(-1)
    chosen = logits.gather(-1, targets.long().masked_fill(ignored, 0)[..., None]).squeeze(-1)
    likely = chosen
    if label_smoothing:  # 0 times the mean would be NaN if a logit is -inf
        likely = (1 - label_smoothing) * chosen + label_smoothing * logits.mean(-1)
    return (lse - likely + z_loss * lse.square()).masked_fill(ignored, 0.0)


def _logits_fake(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.new_empty((len(hidden), len(weight)), dtype=accum_dtype(hidden.dtype))


def _logits_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for sample in _linear_logprob_samples(make):
        hidden, weight, _ = sample.args
        yield SampleInput(sample.name, (hidden, weight))
    yield SampleInput("wide", (make(3, 40), make(601, 40)))


def _logits_cost(hidden: Tensor, weight: Tensor) -> Cost:
    logits = len(hidden) * len(weight)
    return Cost(
        bytes=hidden.nbytes + weight.nbytes + 4 * logits, flops=2 * logits * hidden.shape[1]
    )


def _of_linear(forward: Callable[..., Any]) -> Backward:
    """Return the backward of `linear`, which rounds the gradient to the dtype of the weight."""

    def backward(needs: list[bool], grads: list[Tensor], *args: Any) -> list[Tensor | None]:
        args = linear.with_defaults(args)
        flags = [*needs, *(False for _ in args[len(needs) :])]
        found = iter(linear.backward_overload(flags, [grads[0].to(args[0].dtype)], *args))
        return [next(found) if needed else None for needed in needs]

    return backward


@op(
    check=_check_head,
    fake=_logits_fake,
    samples=_logits_samples,
    tolerance=Tolerance(),
    cost=_logits_cost,
    row_args=("hidden",),
    gradient=_of_linear,
)
def linear_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the logits (T, V) of hidden states (T, D) and the weight (V, D) of the LM head.

    They are in float32, not rounded to the dtype of the weight as by `linear`: `token_logprobs` of
    them is bitwise equal to `linear_token_logprobs`, so that tokens are sampled from the
    distribution that is reported and trained.

    >>> linear_logits(torch.ones(1, 4, dtype=torch.bfloat16), torch.ones(2, 4).bfloat16())
    tensor([[4., 4.]])
    """
    return hidden @ weight.T


@op(
    check=_check_linear,
    fake=_linear_fake,
    samples=_linear_logprob_samples,
    tolerance=Tolerance(),
    cost=_linear_cost,
    row_args=("hidden", "targets"),
    gradient=by_chunks,
)
def linear_token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return `token_logprobs` of `hidden @ weight.T`, computing the logits in chunks.

    >>> linear_token_logprobs(torch.ones(1, 4), torch.zeros(2, 4), torch.tensor([0]))
    tensor([-0.6931])
    """
    return torch.cat(
        [token_logprobs.reference(h @ weight.T, t) for h, t in _chunks(hidden, targets)]
    )


@op(
    check=_check_linear_loss,
    fake=_linear_fake,
    samples=_linear_loss_samples,
    tolerance=Tolerance(),
    cost=_linear_cost,
    row_args=("hidden", "targets"),
    gradient=by_chunks,
)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Return `cross_entropy` of `hidden @ weight.T`, computing the logits in chunks.

    >>> linear_cross_entropy(torch.ones(1, 4), torch.zeros(2, 4), torch.tensor([0]))
    tensor([0.6931])
    """
    options = (ignore_index, label_smoothing, z_loss)
    return torch.cat(
        [cross_entropy.reference(h @ weight.T, t, *options) for h, t in _chunks(hidden, targets)]
    )


def _fwd_bwd_fake(
    hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    weight_grad = weight.new_empty(weight.shape if options[4] else (0, weight.shape[1]))
    return _fake(hidden, targets), hidden.new_empty(hidden.shape), weight_grad


def _fwd_bwd_samples(make: TensorMaker) -> Iterator[SampleInput]:
    for grad_output, sample in zip(cycle((1.0, -0.3)), _linear_loss_samples(make)):
        options = (*sample.args, -100, 0.0, 0.0)[:6]
        yield SampleInput(sample.name, (*options, grad_output))
        if sample.name in ("typical", "chunks"):
            yield SampleInput(f"{sample.name}_frozen", (*options, grad_output, False))


def _fwd_bwd_cost(hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any) -> Cost:
    once, has_weight_grad = _linear_cost(hidden, weight, targets), options[4:] != (False,)
    backward_flops = (4 if has_weight_grad else 2) * targets.numel() * weight.numel()
    written = hidden.nbytes + (weight.nbytes if has_weight_grad else 0)
    return Cost(bytes=once.bytes + written, flops=once.flops + backward_flops)


@op(
    check=_check_linear_loss,
    fake=_fwd_bwd_fake,
    samples=_fwd_bwd_samples,
    tolerance=Tolerance(
        forward=4.0,
        reason="gradients are measured per row, against a baseline in float32 like the losses",
    ),
    cost=_fwd_bwd_cost,
    row_args=(),
    gradient=None,
)
def linear_cross_entropy_fwd_bwd(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    grad_output: float = 1.0,
    weight_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `linear_cross_entropy` and the gradients of `grad_output` times the sum of all losses.

    A training step takes three GEMMs this way. Computed separately, loss and gradients take four,
    since the backward recomputes the logits. Without `weight_grad`, for a frozen weight, it takes
    two, and the gradient of the weight has no rows.

    >>> ones, zeros = torch.ones(1, 4), torch.zeros(2, 4)
    >>> _, _, of_weight = linear_cross_entropy_fwd_bwd(ones, zeros, torch.tensor([0]))
    >>> of_weight[:, 0]
    tensor([-0.5000,  0.5000])
    """
    options = (ignore_index, label_smoothing, z_loss)
    losses, hidden_grads, of_weight = (
        [],
        [],
        torch.zeros_like(weight if weight_grad else weight[:0]),
    )
    for h, t in _chunks(hidden, targets):
        logits = h @ weight.T
        losses.append(cross_entropy.reference(logits, t, *options))
        ignored, lse = (t == ignore_index)[:, None], logits.logsumexp(-1, keepdim=True)
        dlogits = (logits - lse).exp() * (1 + 2 * z_loss * lse) - label_smoothing / len(weight)
        chosen = t.long()[:, None].masked_fill(ignored, 0)
        ones = torch.ones_like(chosen, dtype=dlogits.dtype)
        dlogits = dlogits.scatter_add(1, chosen, (label_smoothing - 1) * ones)
        dlogits = grad_output * dlogits.masked_fill(ignored, 0.0)
        hidden_grads.append(dlogits @ weight)
        if weight_grad:
            of_weight += dlogits.T @ h
    return torch.cat(losses), torch.cat(hidden_grads), of_weight
