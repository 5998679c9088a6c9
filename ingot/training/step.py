"""One step: the gradients of a batch, which may come in several micro_batches, and the update.

    loss = (sum of the losses of everything that counts) / (how much of it there is)

over the whole batch, whatever pieces it comes in: each piece's sum is divided by the count of all.
So a batch gives the same gradients in one piece and in four, to float32's rounding; their mean of
means would not.

StepStats and update are two calls, since between them somebody decides whether it is made
(`ingot.training.guard`).
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ingot.core.targets import IGNORE_INDEX
from ingot.data import ArrayBatch, TokenBatch
from ingot.nn import dropout
from ingot.nn.loss import class_losses, token_losses
from ingot.training.clip import Clipper, grad_norms
from ingot.training.mixup import MixupConfig, apply_mixup
from ingot.training.optimizer import Optimizers
from ingot.training.precision import MasterWeights

Batch = TokenBatch | ArrayBatch


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """What the loss is, besides what the targets say."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    mixup: MixupConfig | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """What is known of a batch's gradients: its mean loss, their norm, how much there was."""

    loss: float
    grad_norm: float
    num_targets: int
    """Targets that count."""
    num_rows: int
    """Tokens, or samples of another kind."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class TrainStep:
    """The steps of one model.

    >>> from ingot.data import xor
    >>> from ingot.nn import Dense, DenseConfig
    >>> from ingot.training.clip import ClipNormConfig
    >>> from ingot.training.optimizer import AdamWConfig
    >>> from ingot.training.precision import Precision
    >>> config = DenseConfig(in_features=2, hidden_dims=(8,), out_features=2)
    >>> model = Dense.from_config(config, seed=0)
    >>> masters = MasterWeights(model, Precision.FP32)
    >>> optimizers = Optimizers(AdamWConfig(lr=0.1), model, masters.weights)
    >>> clipper = Clipper(ClipNormConfig(), len(masters.weights))
    >>> step = TrainStep(model, masters, optimizers, clipper, LossConfig())
    >>> batch = [xor().batch(range(4))]
    >>> first = step.forward_backward(batch, step=0).loss
    >>> for number in range(20):
    ...     _ = step.optimizer_step(1.0)
    ...     last = step.forward_backward(batch, step=number).loss
    >>> last < first / 10
    True
    """

    def __init__(
        self,
        model: nn.Module,
        master_weights: MasterWeights,
        optimizers: Optimizers,
        clipper: Clipper,
        losses: LossConfig,
    ) -> None:
        self.model, self.master_weights, self.optimizers = model, master_weights, optimizers
        self.clipper, self.losses = clipper, losses
        self._norms = torch.empty(0)

    def forward_backward(self, micro_batches: Sequence[Batch], step: int) -> StepStats:
        """Compute the gradients of a batch; former ones are forgotten."""
        self.master_weights.grads.clear()
        self.model.train()
        count, rows, total = sum(map(num_targets, micro_batches)), 0, 0.0
        grad_output = self.master_weights.loss_scale / max(count, 1)
        for index, micro_batch in enumerate(micro_batches):
            dropout.set_step(self.model, seed=self.losses.seed, step=step, row=rows)
            lost = self._losses(micro_batch, step, index, grad_output).sum()
            total += float(lost.detach())
            (lost * grad_output).backward()
            rows += num_rows(micro_batch)
        grads = [
            self.master_weights.grads.get(name, torch.zeros(()))
            for name in self.master_weights.weights
        ]
        self._norms = grad_norms(grads)
        norm = float(self._norms.double().square().sum().sqrt()) / self.master_weights.loss_scale
        return StepStats(
            loss=total / max(count, 1), grad_norm=norm, num_targets=count, num_rows=rows
        )

    def optimizer_step(self, lr_factor: float) -> float:
        """Update the weights and free the gradients; `lr_factor` scales the learning rate.

        Returns by how much the gradients were scaled down at most; 1 is not at all.
        """
        scale = self.master_weights.loss_scale
        factors = self.clipper.factors(self._norms / scale)
        by_name = dict(zip(self.master_weights.weights, (factors / scale).tolist(), strict=True))
        self.optimizers.step(self.master_weights.grads, by_name, lr_factor)
        self.master_weights.copy_to_model()
        return float(factors.min())

    def _losses(self, micro_batch: Batch, step: int, index: int, grad_output: float) -> Tensor:
        """The loss of each row, in training; `grad_output` is what it will be multiplied by."""
        options, smoothing = self.losses, self.losses.label_smoothing
        if isinstance(micro_batch, TokenBatch):
            return token_losses(
                self.model,  # pyright: ignore[reportArgumentType]
                micro_batch.tokens,
                micro_batch.targets,
                micro_batch.lengths,
                label_smoothing=smoothing,
                z_loss=options.z_loss,
                grad_output=grad_output,
            )
        if options.mixup is None:
            return class_losses(self.model(micro_batch.x), micro_batch.y, smoothing)
        key = {"seed": options.seed, "step": step, "index": index}
        mixed = apply_mixup(options.mixup, micro_batch.x, micro_batch.y, **key)
        scores = self.model(mixed.x)
        own, other = (class_losses(scores, y, smoothing) for y in (mixed.y, mixed.other_y))
        return mixed.lam * own + (1 - mixed.lam) * other


def num_targets(batch: Batch) -> int:
    """How many targets of a batch count."""
    if isinstance(batch, TokenBatch):
        return int((batch.targets != IGNORE_INDEX).sum())
    return len(batch.y)


def num_rows(batch: Batch) -> int:
    """How many rows a batch has: tokens, or samples."""
    return len(batch.tokens) if isinstance(batch, TokenBatch) else len(batch.y)
