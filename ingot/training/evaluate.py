"""How good a model is on what was held out of its training."""

# pyright: basic
from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from ingot.core.paths import atomic_file
from ingot.data import TokenBatch
from ingot.nn.loss import class_losses, token_logprobs, token_losses
from ingot.training.step import Batch, num_targets

LOGPROBS = "validation.safetensors"


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """The mean loss of what counts, and the share of right classes where there are some.

    >>> EvalResult(loss=0.5, accuracy=0.75).metrics()
    {'validation_loss': 0.5, 'accuracy': 0.75}
    """

    loss: float
    accuracy: float | None = None

    def metrics(self) -> dict[str, float]:
        """As a line of metrics has them."""
        known = {"validation_loss": self.loss, "accuracy": self.accuracy}
        return {name: value for name, value in known.items() if value is not None}


def batches(samples: Any, batch_size: int, max_batches: int) -> Iterator[Batch]:
    """The first batches of the samples, in order."""
    starts = range(0, len(samples), batch_size)
    for start in itertools.islice(starts, max_batches):
        yield samples.batch(range(start, min(start + batch_size, len(samples))))


def evaluate(model: nn.Module, samples: Any, *, batch_size: int, max_batches: int) -> EvalResult:
    """Score the first samples, so many batches at most.

    >>> from ingot.data import xor
    >>> from ingot.nn import Dense, DenseConfig
    >>> config = DenseConfig(in_features=2, hidden_dims=(), out_features=2)
    >>> model = Dense.from_config(config, seed=0)
    >>> 0 <= evaluate(model, xor(), batch_size=4, max_batches=1).accuracy <= 1
    True
    """
    lost, right, count = 0.0, 0, 0
    classes = False
    model.eval()
    with torch.inference_mode():
        for piece in batches(samples, batch_size, max_batches):
            count += num_targets(piece)
            if isinstance(piece, TokenBatch):
                rows = piece.tokens, piece.targets, piece.lengths
                lost += float(token_losses(model, *rows).double().sum())  # pyright: ignore
            else:
                classes, scores = True, model(piece.x)
                lost += float(class_losses(scores, piece.y).double().sum())
                right += int((scores.argmax(-1) == piece.y).sum())
    model.train()
    return EvalResult(
        loss=lost / max(count, 1), accuracy=right / max(count, 1) if classes else None
    )


def save_logprobs(model: nn.Module, samples: Any, directory: Path, max_samples: int = 8) -> None:
    """Write the log-probabilities of the first samples of text, sample by sample.

    Whoever serves the model can compare: its log-probabilities are these, to the bit.
    """
    model.eval()
    found: dict[str, torch.Tensor] = {}
    with torch.inference_mode():
        for index, piece in enumerate(batches(samples, 1, max_samples)):
            assert isinstance(piece, TokenBatch)
            rows = piece.tokens, piece.targets, piece.lengths
            found[f"{index}.tokens"] = piece.tokens
            found[f"{index}.lengths"] = torch.tensor(piece.lengths)
            found[f"{index}.targets"] = piece.targets
            found[f"{index}.logprobs"] = token_logprobs(model, *rows)  # pyright: ignore
    model.train()
    with atomic_file(directory / LOGPROBS) as temporary:
        save_file(found, temporary)
