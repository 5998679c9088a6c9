"""One step: the gradients of a batch, which may come in several pieces, and the update.

    loss = (sum of the losses of everything that counts) / (how much of it there is)

over the whole batch, whatever pieces it comes in: each piece's sum is divided by the count of all.
So a batch gives the same gradients in one piece and in four, to float32's rounding; their mean of
means would not.

Gradients and update are two calls, since between them somebody decides whether it is made
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
from ingot.training.clip import Clipper, norms
from ingot.training.mix import Mix, blend
from ingot.training.optimizer import Optimizers
from ingot.training.precision import Masters

Batch = TokenBatch | ArrayBatch


@dataclass(frozen=True, kw_only=True)
class Losses:
    """What the loss is, besides what the targets say."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    mix: Mix | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """What is known of a batch's gradients: its mean loss, their norm, how much there was."""

    loss: float
    norm: float
    count: int
    """Targets that count."""
    rows: int
    """Tokens, or samples of another kind."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Step:
    """The steps of one model.

    >>> from ingot.data import xor
    >>> from ingot.nn import Dense, DenseConfig
    >>> from ingot.training.clip import Norm
    >>> from ingot.training.optimizer import AdamW
    >>> from ingot.training.precision import Precision
    >>> config = DenseConfig(in_features=2, hidden_dims=(8,), out_features=2)
    >>> model = Dense.from_config(config, seed=0)
    >>> masters = Masters(model, Precision.FP32)
    >>> optimizers = Optimizers(AdamW(lr=0.1), model, masters.weights)
    >>> step = Step(model, masters, optimizers, Clipper(Norm(), len(masters.weights)), Losses())
    >>> batch = [xor().batch(range(4))]
    >>> first = step.gradients(batch, step=0).loss
    >>> for number in range(20):
    ...     _ = step.update(1.0)
    ...     last = step.gradients(batch, step=number).loss
    >>> last < first / 10
    True
    """

    def __init__(
        self,
        model: nn.Module,
        masters: Masters,
        optimizers: Optimizers,
        clipper: Clipper,
        losses: Losses,
    ) -> None:
        self.model, self.masters, self.optimizers = model, masters, optimizers
        self.clipper, self.losses = clipper, losses
        self._norms = torch.empty(0)

    def gradients(self, pieces: Sequence[Batch], step: int) -> Gradients:
        """Compute the gradients of a batch; former ones are forgotten."""
        self.masters.grads.clear()
        self.model.train()
        count, rows, total = sum(map(counted, pieces)), 0, 0.0
        grad_output = self.masters.scale / max(count, 1)
        for index, piece in enumerate(pieces):
            dropout.set_step(self.model, seed=self.losses.seed, step=step, row=rows)
            lost = self._losses(piece, step, index, grad_output).sum()
            total += float(lost.detach())
            (lost * grad_output).backward()
            rows += size(piece)
        grads = [self.masters.grads.get(name, torch.zeros(())) for name in self.masters.weights]
        self._norms = norms(grads)
        norm = float(self._norms.double().square().sum().sqrt()) / self.masters.scale
        return Gradients(loss=total / max(count, 1), norm=norm, count=count, rows=rows)

    def update(self, factor: float) -> float:
        """Move the weights by the gradients, which are then gone; `factor` is of the learning rate.

        Returns by how much the gradients were scaled down at most; 1 is not at all.
        """
        scale = self.masters.scale
        factors = self.clipper.factors(self._norms / scale)
        by_name = dict(zip(self.masters.weights, (factors / scale).tolist(), strict=True))
        self.optimizers.step(self.masters.grads, by_name, factor)
        self.masters.publish()
        return float(factors.min())

    def _losses(self, piece: Batch, step: int, index: int, grad_output: float) -> Tensor:
        """The loss of each row, in training; `grad_output` is what it will be multiplied by."""
        options, smoothing = self.losses, self.losses.label_smoothing
        if isinstance(piece, TokenBatch):
            return token_losses(
                self.model,  # pyright: ignore[reportArgumentType]
                piece.tokens,
                piece.targets,
                piece.lengths,
                label_smoothing=smoothing,
                z_loss=options.z_loss,
                grad_output=grad_output,
            )
        if options.mix is None:
            return class_losses(self.model(piece.x), piece.y, smoothing)
        key = {"seed": options.seed, "step": step, "index": index}
        mixed = blend(options.mix, piece.x, piece.y, **key)
        scores = self.model(mixed.x)
        own, other = (class_losses(scores, y, smoothing) for y in (mixed.y, mixed.other_y))
        return mixed.share * own + (1 - mixed.share) * other


def counted(batch: Batch) -> int:
    """How many targets of a batch count."""
    if isinstance(batch, TokenBatch):
        return int((batch.targets != IGNORE_INDEX).sum())
    return len(batch.y)


def size(batch: Batch) -> int:
    """How many rows a batch has: tokens, or samples."""
    return len(batch.tokens) if isinstance(batch, TokenBatch) else len(batch.y)
