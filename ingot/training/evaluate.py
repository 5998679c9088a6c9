"""Evaluation of a model on validation data."""

# pyright: basic
from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn

from ingot.core.paths import atomic_file
from ingot.data import TokenBatch
from ingot.nn.layout import BatchLayout
from ingot.nn.loss import token_logprobs
from ingot.parallel.ranks import Ranks
from ingot.training.objective import Batch, CrossEntropy, Objective

if TYPE_CHECKING:
    from ingot.parallel.pipeline import Pipeline

LOGPROBS = "validation.safetensors"


@dataclass(frozen=True, kw_only=True)
class EvalResult:
    """Mean loss of the targets, for classifiers the accuracy, and the objective's other metrics.

    >>> EvalResult(loss=0.5, accuracy=0.75).metrics()
    {'validation_loss': 0.5, 'accuracy': 0.75}
    >>> EvalResult(loss=0.5, others={"rewards/margins": 0.1}).metrics()
    {'validation_loss': 0.5, 'validation_rewards/margins': 0.1}
    """

    loss: float
    accuracy: float | None = None
    others: dict[str, float] = field(default_factory=dict[str, float])

    def metrics(self) -> dict[str, float]:
        """Return the fields as a line of metrics.jsonl names them."""
        known = {"validation_loss": self.loss, "accuracy": self.accuracy}
        others = {f"validation_{name}": value for name, value in self.others.items()}
        return {name: value for name, value in known.items() if value is not None} | others


def iterate_batches(dataset: Any, batch_size: int, max_batches: int) -> Iterator[Batch]:
    """Yield the first batches of a dataset, in order."""
    starts = range(0, len(dataset), batch_size)
    for start in itertools.islice(starts, max_batches):
        yield dataset.batch(range(start, min(start + batch_size, len(dataset))))


def evaluate(
    model: nn.Module,
    dataset: Any,
    *,
    batch_size: int,
    max_batches: int,
    objective: Objective | None = None,
    ranks: Ranks | None = None,
    pipeline: Pipeline | None = None,
) -> EvalResult:
    """Return the loss and accuracy of the first `max_batches` batches of a dataset.

    The batches are computed on the model's device, divided among the ranks; the sums are read once,
    at the end, and added in the order of the batches. If the model is a part of a pipeline, its
    last stage has the sums, and shares them.

    >>> from ingot.data import xor
    >>> from ingot.nn import Dense, DenseConfig
    >>> config = DenseConfig(in_features=2, hidden_dims=(), out_features=2)
    >>> model = Dense.from_config(config, seed=0)
    >>> 0 <= evaluate(model, xor(), batch_size=4, max_batches=1).accuracy <= 1
    True
    """
    objective = CrossEntropy() if objective is None else objective
    device = next(model.parameters()).device
    ranks = Ranks() if ranks is None else ranks
    sums: dict[str, list[torch.Tensor]] = {}
    counts: list[float] = []
    model.eval()
    with torch.no_grad():
        for batch, counted in _own_batches(dataset, batch_size, max_batches, ranks):
            counts.append(objective.num_targets(batch) * counted)
            batch = batch.to(device)
            computed: Any = _through_stages(pipeline, batch) if pipeline else model
            if computed is None:
                continue
            for name, value in objective.metric_sums(computed, batch).items():
                sums.setdefault(name, []).append(value * counted)
    model.train()
    count = sum(map(sum, ranks.gather(counts)))
    numbers = {name: torch.stack(values).tolist() for name, values in sums.items()}
    if pipeline:
        numbers = pipeline.share(numbers)
    means = {name: _total(values, ranks) / max(count, 1) for name, values in numbers.items()}
    return EvalResult(loss=means.pop("loss"), accuracy=means.pop("accuracy", None), others=means)


def _through_stages(pipeline: Pipeline, batch: Any) -> Any:
    """Return a model that has the hidden states of the batch, in the last stage; else None."""
    layout = BatchLayout.packed(batch.lengths, batch.tokens.device)
    return pipeline.forward(batch.tokens, layout)


def _own_batches(
    dataset: Any, batch_size: int, max_batches: int, ranks: Ranks
) -> Iterator[tuple[Batch, bool]]:
    """Yield every batch of this rank, and whether it counts: all ranks have as many.

    Ranks whose weights are sharded compute each batch at the same time.
    """
    number = min(max_batches, -(-len(dataset) // batch_size))
    for first in range(0, number, ranks.size):
        index = first + ranks.rank
        start = min(index, number - 1) * batch_size
        batch = dataset.batch(range(start, min(start + batch_size, len(dataset))))
        yield batch, index < number


def _total(values: list[float], ranks: Ranks) -> float:
    """Return the sum over the batches of all ranks, in their order."""
    by_rank = ranks.gather(values)
    return sum(value for at_once in zip(*by_rank, strict=True) for value in at_once)


def save_logprobs(
    model: nn.Module,
    dataset: Any,
    directory: Path,
    max_samples: int = 8,
    *,
    write: bool = True,
    pipeline: Pipeline | None = None,
) -> None:
    """Write the log-probabilities of the first samples of text, sample by sample.

    A server of the same model returns the same numbers, bitwise. Ranks whose weights are sharded
    compute them together, and one of them writes: in a pipeline one that has the last stage.
    """
    device = next(model.parameters()).device
    model.eval()
    tensors: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for index, host_batch in enumerate(iterate_batches(dataset, 1, max_samples)):
            assert isinstance(host_batch, TokenBatch)
            batch = host_batch.to(device)
            computed: Any = _through_stages(pipeline, batch) if pipeline else model
            if computed is None:
                continue
            logprobs = token_logprobs(computed, batch.tokens, batch.targets, batch.lengths)
            tensors[f"{index}.tokens"] = host_batch.tokens
            tensors[f"{index}.lengths"] = torch.tensor(host_batch.lengths)
            tensors[f"{index}.targets"] = host_batch.targets
            tensors[f"{index}.logprobs"] = logprobs.cpu()
    model.train()
    if write:
        with atomic_file(directory / LOGPROBS) as temporary:
            save_file(tensors, temporary)
