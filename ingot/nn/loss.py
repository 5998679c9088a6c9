"""Losses of models: one number a token or a sample, nothing averaged.

Legend: T tokens, D channels, B samples, C classes.
"""

# pyright: basic
from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ingot import ops
from ingot.nn.plan import Plan

IGNORED = -100
"""A target that loses nothing."""


class LanguageModel(Protocol):
    """Packed tokens in, states out, and the weight that makes scores of them."""

    @property
    def head_weight(self) -> Tensor:
        """The weight of the vocabulary."""
        ...

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, plan: Plan) -> Tensor:
        """The state of each token."""
        ...


def token_losses(
    model: LanguageModel,
    tokens_T: Tensor,
    targets_T: Tensor,
    lengths: list[int],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The loss of each token's target, (T,); sequences of these lengths, one after another.

    >>> import torch
    >>> from ingot.nn import Decoder, preset
    >>> model = Decoder.new(preset("tiny"), seed=0)
    >>> token_losses(model, torch.arange(3), torch.tensor([1, 2, -100]), [3])[2].item()
    0.0
    """
    plan = Plan.packed(lengths, tokens_T.device)
    hidden_TD = model(tokens_T, plan.positions(), plan)
    options = (IGNORED, label_smoothing, z_loss)
    return ops.linear_cross_entropy(hidden_TD, model.head_weight, targets_T, *options)


def token_logprobs(
    model: LanguageModel, tokens_T: Tensor, targets_T: Tensor, lengths: list[int]
) -> Tensor:
    """The log-probability of each token's target, (T,); 0 where there is none."""
    plan = Plan.packed(lengths, tokens_T.device)
    hidden_TD = model(tokens_T, plan.positions(), plan)
    missing_T = targets_T == IGNORED
    found_T = ops.linear_token_logprobs(
        hidden_TD, model.head_weight, targets_T.masked_fill(missing_T, 0)
    )
    return found_T.masked_fill(missing_T, 0.0)


def class_losses(scores_BC: Tensor, targets_B: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The loss of each sample's class, (B,).

    >>> import torch
    >>> class_losses(torch.zeros(1, 2), torch.tensor([1]))
    tensor([0.6931])
    """
    return ops.cross_entropy(scores_BC, targets_B, IGNORED, label_smoothing)
