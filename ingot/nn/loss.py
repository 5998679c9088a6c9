"""Losses of models, one per token or sample, without reduction.

Legend: T tokens, D channels, B samples, C classes.
"""

# pyright: basic
from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ingot import ops
from ingot.core.targets import IGNORE_INDEX
from ingot.nn.layout import BatchLayout


class LanguageModel(Protocol):
    """A model from packed tokens to hidden states, and the weight of its LM head."""

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
    args = (hidden_TD, model.lm_head_weight, targets_T, IGNORE_INDEX, label_smoothing, z_loss)
    if grad_output is None or not (hidden_TD.requires_grad and torch.is_grad_enabled()):
        losses = ops.linear_cross_entropy(*args)
    else:
        losses = _WithGradients.apply(grad_output, *args)  # pyright: ignore
    if target_rows is None:
        return losses
    return losses.new_zeros(len(tokens_T)).index_copy(0, target_rows, losses)


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
    logprobs_T = ops.linear_token_logprobs(
        hidden_TD, model.lm_head_weight, targets_T.masked_fill(ignored_T, 0)
    )
    return logprobs_T.masked_fill(ignored_T, 0.0)


def class_losses(logits_BC: Tensor, targets_B: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each sample, (B,).

    >>> import torch
    >>> class_losses(torch.zeros(1, 2), torch.tensor([1]))
    tensor([0.6931])
    """
    return ops.cross_entropy(logits_BC, targets_B, IGNORE_INDEX, label_smoothing)
