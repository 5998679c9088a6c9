"""Losses of models, one per token or sample, without reduction.

Legend: T tokens, D channels, B samples, C classes.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot import ops
from ingot.core.targets import IGNORE_INDEX
from ingot.nn.layout import BatchLayout
from ingot.nn.recompute import run_by_rows
from ingot.ops.loss import CHUNK

_ALL_TOKENS = 1 << 22  # no vocabulary is larger


class LanguageModel(Protocol):
    """A model from packed tokens to hidden states, and the weight of its LM head.

    Or it has `has_quantized_head`, as a `Decoder` may, with `logits` and `logprobs` instead of the
    weight. Such a head is frozen; its losses have gradients of the hidden states alone.
    """

    @property
    def lm_head_weight(self) -> Tensor:
        """Weight of the LM head, (V, D)."""
        ...

    def __call__(self, tokens_T: Tensor, layout: BatchLayout) -> Tensor:
        """Return the hidden state of each token, (T, D)."""
        ...


def token_losses(
    model: LanguageModel,
    tokens_T: Tensor,
    targets_T: Tensor,
    lengths: list[int],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    grad_output: float | None = None,
    target_rows: Tensor | None = None,
) -> Tensor:
    """Return the loss of each token's target, (T,), for packed sequences of these lengths.

    If the factor that each loss is multiplied by before backward is known, pass it as
    `grad_output`: the gradients of head and states are then computed together with the losses,
    in three matmuls instead of four, or in two if the head is frozen. If the upstream gradient
    differs after all, the gradients are computed again on the CPU; on an accelerator that is an
    error, raised by the device.

    `target_rows` are the indices of the targets that are not ignored. If given, the LM head is
    applied to these rows alone; their losses have the same bits.

    >>> import torch
    >>> from ingot.nn import Decoder, preset
    >>> model = Decoder.from_config(preset("tiny"), seed=0)
    >>> token_losses(model, torch.arange(3), torch.tensor([1, 2, -100]), [3])[2].item()
    0.0
    """
    layout = BatchLayout.packed(lengths, tokens_T.device)
    hidden_TD = model(tokens_T, layout)
    if target_rows is not None:
        hidden_TD, targets_T = hidden_TD[target_rows], targets_T[target_rows]
    options = (label_smoothing, z_loss)
    losses = _cross_entropy(model, hidden_TD, targets_T, options, grad_output)
    if target_rows is None:
        return losses
    return losses.new_zeros(len(tokens_T)).index_copy(0, target_rows, losses)


def _cross_entropy(
    model: Any,
    hidden_TD: Tensor,
    targets_T: Tensor,
    options: tuple[float, float],
    grad_output: float | None,
) -> Tensor:
    if _has_quantized_head(model):

        def of_logits(hidden_TD: Tensor, targets_T: Tensor) -> Tensor:
            return _cross_entropy_of_logits(model.logits(hidden_TD), targets_T, *options)

        return run_by_rows(of_logits, CHUNK, hidden_TD, targets_T)
    args = (hidden_TD, model.lm_head_weight, targets_T, IGNORE_INDEX, *options)
    if grad_output is None or not (hidden_TD.requires_grad and torch.is_grad_enabled()):
        return ops.linear_cross_entropy(*args)
    return _WithGradients.apply(grad_output, *args)  # pyright: ignore


def _cross_entropy_of_logits(
    logits_TV: Tensor, targets_T: Tensor, label_smoothing: float, z_loss: float
) -> Tensor:
    """Return `ops.cross_entropy`, from the log-probabilities whose bits are served."""
    ignored_T = targets_T == IGNORE_INDEX
    known_T = targets_T.masked_fill(ignored_T, 0)
    logprobs_T = ops.token_logprobs(logits_TV, known_T)
    losses_T = -logprobs_T
    if label_smoothing or z_loss:
        chosen_T = logits_TV.gather(1, known_T[:, None])[:, 0]
        losses_T = losses_T + label_smoothing * (chosen_T - logits_TV.mean(1))
        losses_T = losses_T + z_loss * (chosen_T - logprobs_T).square()
    return losses_T.masked_fill(ignored_T, 0.0)


def _has_quantized_head(model: Any) -> bool:
    return getattr(model, "has_quantized_head", False)


class _WithGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad_output: float, *args: Any) -> Tensor:
        hidden_TD, weight_VD, targets_T, *ctx.options = args
        trained = weight_VD.requires_grad
        found = ops.linear_cross_entropy_fwd_bwd(*args, grad_output, trained)  # pyright: ignore
        losses_T, of_hidden, of_weight = found
        ctx.save_for_backward(hidden_TD, weight_VD, targets_T, of_hidden, of_weight)
        ctx.grad_output = grad_output
        return losses_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads_T: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        *args, of_hidden, of_weight = ctx.saved_tensors
        expected = torch.tensor(ctx.grad_output, dtype=grads_T.dtype)
        others_T = (grads_T != expected) & (args[2] != IGNORE_INDEX)
        if grads_T.device.type != "cpu":
            # Reading the result would make the host wait for the device in every backward.
            torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
                ~others_T.any(), "grad_output is not the upstream gradient"
            )
        elif others_T.any():
            with torch.enable_grad():
                leaves = [arg.detach().requires_grad_() for arg in args[:2]]
                losses_T = ops.linear_cross_entropy(leaves[0], leaves[1], args[2], *ctx.options)
            of_hidden, of_weight = torch.autograd.grad(losses_T, leaves, grads_T)
        if not ctx.needs_input_grad[2]:
            of_weight = None
        return None, of_hidden, of_weight, *(None for _ in range(4))


def token_logprobs(
    model: LanguageModel, tokens_T: Tensor, targets_T: Tensor, lengths: list[int]
) -> Tensor:
    """Return the log-probability of each token's target, (T,); 0 for ignored targets."""
    layout = BatchLayout.packed(lengths, tokens_T.device)
    hidden_TD = model(tokens_T, layout)
    ignored_T = targets_T == IGNORE_INDEX
    known_T = targets_T.masked_fill(ignored_T, 0)
    if _has_quantized_head(model):
        logprobs_T = model.logprobs(hidden_TD, known_T)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        logprobs_T = ops.linear_token_logprobs(hidden_TD, model.lm_head_weight, known_T)
    return logprobs_T.masked_fill(ignored_T, 0.0)


def sampled_logprobs(
    model: LanguageModel,
    tokens_T: Tensor,
    targets_T: Tensor,
    lengths: list[int],
    *,
    temperature: float | Tensor = 1.0,
    top_k: int | Tensor | None = None,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
) -> Tensor:
    """Return the log-probability of each target in the distribution that was sampled from, (T,).

    It is bitwise equal to the `processed` log-probability that the engine reports with the same
    options, which are numbers or tensors with one entry per token. Ignored targets have 0, excluded
    ones -inf. The gradient takes the kept tokens of each row as constant. The logits of at most
    `CHUNK` rows are in memory at a time; the backward recomputes them.

    >>> import torch
    >>> from ingot.nn import Decoder, preset
    >>> model = Decoder.from_config(preset("tiny"), seed=0)
    >>> tokens, targets = torch.arange(3), torch.tensor([1, 2, -100])
    >>> unchanged = sampled_logprobs(model, tokens, targets, [3])
    >>> torch.equal(unchanged, token_logprobs(model, tokens, targets, [3]))
    True
    """
    hidden_TD = model(tokens_T, BatchLayout.packed(lengths, tokens_T.device))
    top_k = _ALL_TOKENS if top_k is None else top_k
    options = [
        option.to(targets_T.device, dtype).expand(len(targets_T))
        if isinstance(option, Tensor)
        else torch.full_like(targets_T, option, dtype=dtype)
        for option, dtype in (
            (temperature, torch.float32),
            (top_k, torch.int64),
            (top_p, torch.float32),
            (min_p, torch.float32),
        )
    ]
    (rows_N,) = torch.nonzero(targets_T != IGNORE_INDEX, as_tuple=True)
    hidden_ND, *rows = (tensor[rows_N] for tensor in (hidden_TD, targets_T, *options))
    if _has_quantized_head(model):
        head: Any = model

        def of_logits(hidden_ND: Tensor, *others: Tensor) -> Tensor:
            return _gather_logprobs(head.logits(hidden_ND), *others)

        logprobs_N = run_by_rows(of_logits, CHUNK, hidden_ND, *rows)
    else:
        logprobs_N = _SampledLogprobs.apply(hidden_ND, model.lm_head_weight, *rows)
    return logprobs_N.new_zeros(len(targets_T)).index_put((rows_N,), logprobs_N)


class _SampledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, *options_N: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_ND, weight_VD, *options_N)
        chunks = _chunks(hidden_ND, *options_N)
        logprobs = [_sampled_logprobs(h, weight_VD, *options) for h, *options in chunks]
        return torch.cat(logprobs) if logprobs else hidden_ND.new_zeros(0, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads_N: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        hidden_ND, weight_VD, *options_N = ctx.saved_tensors
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        hidden_grads: list[Tensor] = [hidden_ND[:0]]
        # Rounded once per chunk and once at the end, not once per addition.
        weight_grad = torch.zeros_like(weight_VD, dtype=grads_N.dtype) if of_weight else None
        for grads, hidden, *options in _chunks(grads_N, hidden_ND, *options_N):
            leaves = [hidden.detach().requires_grad_(of_hidden)]
            leaves.append(weight_VD.detach().requires_grad_(of_weight))
            with torch.enable_grad():
                logprobs = _sampled_logprobs(leaves[0], leaves[1], *options)
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            found = list(torch.autograd.grad(logprobs, wanted, grads))
            if weight_grad is not None:
                weight_grad += found.pop()
            hidden_grads += found
        hidden_grad = torch.cat(hidden_grads) if of_hidden else None
        weight_grad = None if weight_grad is None else weight_grad.to(weight_VD.dtype)
        return hidden_grad, weight_grad, *(None for _ in options_N)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(CHUNK) for tensor in tensors), strict=True)


def _sampled_logprobs(
    hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *options: Tensor
) -> Tensor:
    return _gather_logprobs(ops.linear_logits(hidden_ND, weight_VD), targets_N, *options)


def _gather_logprobs(logits_NV: Tensor, targets_N: Tensor, *options: Tensor) -> Tensor:
    logprobs_NV = ops.sampling_logprobs(logits_NV, *options)  # pyright: ignore[reportCallIssue]
    return logprobs_NV.gather(1, targets_N[:, None])[:, 0]


def class_losses(logits_BC: Tensor, targets_B: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each sample, (B,).

    >>> import torch
    >>> class_losses(torch.zeros(1, 2), torch.tensor([1]))
    tensor([0.6931])
    """
    return ops.cross_entropy(logits_BC, targets_B, IGNORE_INDEX, label_smoothing)
