"""Direct preference optimization (Rafailov et al. 2023): losses of preference pairs.

With x a prompt, c and r its chosen and its rejected answer, and ref the initial model, the
log-ratio of an answer is the sum over its tokens of

    log-probability of the trained model - log-probability of ref

and beta times it is the implicit reward of the answer. With d the log-ratio of c minus that of r,
and d' the same with both divided by the number of tokens of their answer, the loss of a pair is

    sigmoid        -log sigmoid(beta d)              DPO, equation 7
    hinge          max(0, 1 - beta d)                SLiC (Zhao et al. 2023)
    ipo            (d' - 1 / (2 beta))**2            IPO (Azar et al. 2024), equation 17
    sigmoid_norm   -log sigmoid(beta d')             length-normalized, as in SimPO but with ref

plus `sft_weight` times the cross-entropy of c, its mean over the tokens. These are TRL's
definitions of the same names; there the cross-entropy is the mean over the tokens of a batch, here
every pair has the same weight, so that it does not depend on the micro-batches.

Log-ratios are summed from the differences of tokens, not computed as the difference of sums. The
engine's log-probabilities are bitwise equal to the trainer's, so before the first update every
difference is 0: the loss is log 2 and the margin 0, without rounding.

Legend: N targets of a batch, B pairs.
"""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ingot.data import PairBatch
from ingot.nn.layout import BatchLayout
from ingot.training.objective import DPOConfig, LossOutput, PreferenceLoss


@dataclass(frozen=True)
class AnswerPairs:
    """Log-ratios and lengths of the answers of some pairs, (B,) each."""

    chosen_logratios: Tensor
    rejected_logratios: Tensor
    num_chosen: Tensor
    """Tokens of the chosen answers."""
    num_rejected: Tensor


def pair_losses(pairs: AnswerPairs, loss: PreferenceLoss, beta: float) -> Tensor:
    """Return the loss of each pair, (B,).

    >>> zero, one = torch.zeros(1), torch.ones(1)
    >>> pair_losses(AnswerPairs(zero, zero, one, one), "sigmoid", beta=0.1)
    tensor([0.6931])
    """
    chosen, rejected = pairs.chosen_logratios, pairs.rejected_logratios
    if loss in ("ipo", "sigmoid_norm"):
        chosen, rejected = chosen / pairs.num_chosen, rejected / pairs.num_rejected
    difference = chosen - rejected
    if loss == "ipo":
        return (difference - 1 / (2 * beta)).square()
    if loss == "hinge":
        return (1 - beta * difference).relu()
    return -F.logsigmoid(beta * difference)


@dataclass(frozen=True, kw_only=True)
class DPO:
    """The objective of preference pairs; batches need reference log-probabilities."""

    config: DPOConfig

    def num_targets(self, batch: PairBatch) -> int:
        """Return the number of pairs."""
        return len(batch.sample_ids)

    def losses(
        self, model: nn.Module, batch: PairBatch, *, step: int, index: int, grad_output: float
    ) -> LossOutput:
        """Return the loss of each pair, and the sums of the metrics over the pairs.

        Losses are computed in float32. They are returned in float64, so that their sum has no
        rounding error.
        """
        assert batch.reference is not None
        beta = self.config.beta
        logprobs_N = target_logprobs(model, batch)
        logratios_B2 = _sum_answers(logprobs_N - batch.reference, batch)
        logps_B2 = _sum_answers(logprobs_N, batch)
        counts_B2 = torch.tensor(batch.num_targets, device=logprobs_N.device).view(-1, 2)
        pairs = AnswerPairs(*logratios_B2.unbind(1), *counts_B2.unbind(1))
        losses_B = pair_losses(pairs, self.config.loss, beta).double()
        if self.config.sft_weight:
            losses_B = losses_B - self.config.sft_weight * logps_B2[:, 0] / pairs.num_chosen
        return LossOutput(losses_B, _metric_sums(beta * logratios_B2.detach(), logps_B2.detach()))

    def metric_sums(self, model: nn.Module, batch: PairBatch) -> dict[str, Tensor]:
        """Return the sums of the losses and the metrics of a validation batch."""
        output = self.losses(model, batch, step=0, index=0, grad_output=1.0)
        return {"loss": output.losses.sum(), **output.metric_sums}


def target_logprobs(model: Any, batch: PairBatch) -> Tensor:
    """Return the log-probability of each target, (N,), in float32."""
    layout = BatchLayout.packed(batch.lengths, batch.tokens.device)
    hidden_ND = model(batch.tokens, layout)[batch.target_rows]
    return model.logprobs(hidden_ND, batch.targets[batch.target_rows])


def _sum_answers(values_N: Tensor, batch: PairBatch) -> Tensor:
    """Return the sum of the values of each answer, (B, 2): chosen, rejected."""
    sums = [part.sum() for part in values_N.split(batch.num_targets)]
    return torch.stack(sums).view(-1, 2)


def _metric_sums(rewards_B2: Tensor, logps_B2: Tensor) -> dict[str, Tensor]:
    """Return sums over the pairs, with TRL's names."""
    chosen, rejected = rewards_B2.double().unbind(1)
    sums = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).double(),
        "rewards/margins": chosen - rejected,
        "logps/chosen": logps_B2[:, 0].double(),
        "logps/rejected": logps_B2[:, 1].double(),
    }
    return {name: values_B.sum() for name, values_B in sums.items()}
