"""Objectives: what a training step minimizes.

An objective turns a batch into the losses of its rows. A step minimizes

    (sum of the losses of all rows) / (number of targets)

over the whole global batch, whatever its micro-batches are (`ingot.training.step`). Evaluation
divides other sums by the same number.

To add an objective, write its config and add it to `ObjectiveConfig`, write a class with the
methods of `Objective`, and build it in `ingot.training.recipe.build_objective`.
"""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from ingot.core.config import check_bounds
from ingot.core.targets import IGNORE_INDEX
from ingot.data import ArrayBatch, TokenBatch
from ingot.nn.loss import class_losses, token_losses
from ingot.training.mixup import MixupConfig, apply_mixup

Batch = TokenBatch | ArrayBatch


@dataclass(frozen=True, kw_only=True)
class CrossEntropyConfig:
    """Cross-entropy of every next token, or of the class of each sample."""

    kind: Literal["cross_entropy"] = "cross_entropy"


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Supervised fine-tuning: cross-entropy of the assistant's tokens in conversations."""

    kind: Literal["sft"] = "sft"


PreferenceLoss = Literal["sigmoid", "ipo", "hinge", "sigmoid_norm"]


@dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """Direct preference optimization: see `ingot.training.preference`."""

    kind: Literal["dpo"] = "dpo"
    loss: PreferenceLoss = "sigmoid"
    """The loss of a pair: "sigmoid" (DPO), "ipo", "hinge", or "sigmoid_norm", which divides the
    log-ratio of an answer by its number of tokens."""
    beta: float = 0.1
    """Strength of the reference model: larger values keep the trained model closer to it."""
    sft_weight: float = 0.0
    """Weight of the chosen answer's cross-entropy, its mean over the tokens, in the loss."""

    def __post_init__(self) -> None:
        check_bounds(self, beta=(1e-6, 1e3), sft_weight=(0.0, 1e3))


ObjectiveConfig = CrossEntropyConfig | SFTConfig | DPOConfig


@dataclass(frozen=True)
class LossOutput:
    """Losses of the rows of a batch."""

    losses: Tensor
    metric_sums: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Sums over the targets of other metrics, by the name of their mean."""


class Objective(Protocol):
    """What `TrainStep` and `evaluate` need; batches are on the model's device."""

    def num_targets(self, batch: Any) -> int:
        """Return how many targets of a batch on the host count towards the mean loss."""
        ...

    def losses(
        self, model: nn.Module, batch: Any, *, step: int, index: int, grad_output: float
    ) -> LossOutput:
        """Return the loss of each row of micro-batch `index`.

        Each will be multiplied by `grad_output` before backward.
        """
        ...

    def metric_sums(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return sums over the targets of a validation batch by the name of their mean.

        "loss" is among them.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class CrossEntropy:
    """Cross-entropy of tokens or classes; targets of `IGNORE_INDEX` do not count.

    >>> from ingot.data import xor
    >>> CrossEntropy().num_targets(xor().batch(range(4)))
    4
    """

    label_smoothing: float = 0.0
    """Probability mass that is spread evenly over all classes."""
    z_loss: float = 0.0
    """Weight of the squared log-partition function, for language models."""
    mixup: MixupConfig | None = None
    """How images of a batch are mixed; None for not at all."""
    seed: int = 0
    """Seed of mixup."""

    def num_targets(self, batch: Batch) -> int:
        """Return how many targets count towards the mean loss."""
        if isinstance(batch, TokenBatch):
            return int((batch.targets != IGNORE_INDEX).sum())
        return len(batch.y)

    def losses(
        self, model: nn.Module, batch: Batch, *, step: int, index: int, grad_output: float
    ) -> LossOutput:
        """Return the loss of each token or sample."""
        return LossOutput(self._losses(model, batch, step, index, grad_output))

    def _losses(
        self, model: nn.Module, batch: Batch, step: int, index: int, grad_output: float
    ) -> Tensor:
        smoothing = self.label_smoothing
        if isinstance(batch, TokenBatch):
            return token_losses(
                model,  # pyright: ignore[reportArgumentType]
                batch.tokens,
                batch.targets,
                batch.lengths,
                label_smoothing=smoothing,
                z_loss=self.z_loss,
                grad_output=grad_output,
                target_rows=batch.target_rows,
            )
        if self.mixup is None:
            return class_losses(model(batch.x), batch.y, smoothing)
        key = {"seed": self.seed, "step": step, "index": index}
        mixed = apply_mixup(self.mixup, batch.x, batch.y, **key)
        logits = model(mixed.x)
        own, other = (class_losses(logits, y, smoothing) for y in (mixed.y, mixed.other_y))
        return mixed.lam * own + (1 - mixed.lam) * other

    def metric_sums(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the sum of the losses, and of the correct predictions of a classifier."""
        if isinstance(batch, TokenBatch):
            rows = batch.tokens, batch.targets, batch.lengths
            losses = token_losses(model, *rows, target_rows=batch.target_rows)  # pyright: ignore
            return {"loss": losses.double().sum()}
        logits = model(batch.x)
        num_correct = (logits.argmax(-1) == batch.y).sum()
        return {
            "loss": class_losses(logits, batch.y).double().sum(),
            "accuracy": num_correct.double(),
        }
