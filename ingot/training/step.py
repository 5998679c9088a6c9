"""One training step: the gradients of a global batch in micro-batches, and the optimizer update.

    loss = (sum of the losses of all targets) / (number of targets)

over the whole global batch: the sum of each micro-batch is divided by the number of targets of all.
So a batch gives the same gradients in one micro-batch and in four, up to float32 rounding; the mean
of the micro-batches' means would not.

`forward_backward` and `optimizer_step` are separate calls, because the trainer decides between them
whether the update is applied (`ingot.training.guard`).

With several ranks, each computes its own micro-batches of the global batch; the statistics and the
update are those of the whole, with the same bits on any number of ranks
(`ingot.training.gradients`).

On an accelerator a step reads one small tensor back: the losses of the micro-batches and the norm
of each gradient. Everything else the host needs is computed from these numbers.
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ingot.data import TokenBatch
from ingot.nn import dropout
from ingot.nn.layout import BatchLayout
from ingot.parallel.compression import Int8Rounding
from ingot.parallel.mesh import Mesh
from ingot.parallel.ranks import Ranks, row_slice
from ingot.parallel.shard import ShardedModel
from ingot.training.clip import Clipper, grad_norms
from ingot.training.objective import Batch, Objective
from ingot.training.optimizer import Optimizers
from ingot.training.precision import MasterWeights
from ingot.training.statistics import summarize

if TYPE_CHECKING:
    from ingot.parallel.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """Numbers about one global batch, on the host."""

    loss: float
    """Mean loss of the targets."""
    grad_norm: float
    """Norm of all gradients together, before clipping."""
    num_targets: int
    """Targets that count towards the loss."""
    num_rows: int
    """Tokens, or samples of another kind."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])
    """Means of the objective's other metrics over the targets."""

    @property
    def finite(self) -> bool:
        """Whether the loss and the gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class _Size:
    """Size of a micro-batch, and how many rows of the global batch precede it."""

    num_targets: int
    num_rows: int
    first_row: int


class TrainStepHooks:
    """Callbacks of `TrainStep`, all empty. Subclass it to time or to trace a step.

    >>> class Trace(TrainStepHooks):
    ...     def after_forward(self, index: int) -> None:
    ...         print("forward", index)
    """

    def after_forward(self, index: int) -> None:
        """Run after the losses of micro-batch `index` were computed, before their backward."""

    def after_backward(self, index: int) -> None:
        """Run after the backward of micro-batch `index`."""

    def after_optimizer_step(self) -> None:
        """Run after the weights were updated."""


class TrainStep:
    """Training steps of one model, on the device of its parameters; `seed` is that of dropout.

    `shard_batches` is the number of micro-batches of a shard, see `ingot.training.gradients`; a
    call has a multiple of it, as many on each of the ranks of `mesh`, which `sharded` is on.
    `rounding` is that of the gradients of each shard. `names` are the weights of the whole model;
    `pipeline` has the stages of this rank, if the model is only a part of it. Then its hooks are
    called after the optimizer step alone.

    >>> from ingot.data import xor
    >>> from ingot.nn import Dense, DenseConfig
    >>> from ingot.training.clip import ClipNormConfig
    >>> from ingot.training.objective import CrossEntropy
    >>> from ingot.training.optimizer import AdamWConfig
    >>> from ingot.training.precision import Precision
    >>> config = DenseConfig(in_features=2, hidden_dims=(8,), out_features=2)
    >>> model = Dense.from_config(config, seed=0)
    >>> master_weights = MasterWeights(model, Precision.FP32)
    >>> optimizers = Optimizers(AdamWConfig(lr=0.1), model, master_weights.weights)
    >>> clipper = Clipper(ClipNormConfig(), len(master_weights.weights))
    >>> step = TrainStep(model, master_weights, optimizers, clipper, CrossEntropy())
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
        objective: Objective,
        hooks: TrainStepHooks | None = None,
        *,
        seed: int = 0,
        sharded: ShardedModel | None = None,
        mesh: Mesh | None = None,
        shard_batches: int = 1,
        rounding: Int8Rounding | None = None,
        names: Sequence[str] | None = None,
        pipeline: Pipeline | None = None,
    ) -> None:
        self._mesh, self._sharded = Mesh() if mesh is None else mesh, sharded
        self._ranks = self._mesh.data
        self._shard_batches, self._rounding = shard_batches, rounding
        self._pipeline = pipeline
        self._names = list(master_weights.weights) if names is None else names
        self.model, self.master_weights, self.optimizers = model, master_weights, optimizers
        self.clipper, self.objective, self._seed = clipper, objective, seed
        self.hooks = TrainStepHooks() if hooks is None else hooks
        self._device = next(model.parameters()).device
        self._norms = torch.empty(0)
        self.grads: dict[str, Tensor] = {}
        """Gradients of the global batch, by the names of the weights."""

    def forward_backward(self, micro_batches: Sequence[Batch], step: int) -> StepStats:
        """Compute the gradients of a global batch; gradients of an earlier call are dropped.

        The micro-batches are on the host, as the loader returns them.
        """
        masters = self.master_weights
        self.clear_grads()
        self.model.train()
        sizes = self._exchange_sizes(micro_batches)
        count = sum(size.num_targets for size in sizes)
        grad_output = masters.loss_scale / max(count, 1)
        sums: dict[str, list[Tensor]] = {}

        def prepare(module: nn.Module, own: int) -> None:
            index = self._global_index(own)
            row = sizes[index].first_row + self._first_own_row(sizes[index].num_rows)
            dropout.set_step(module, seed=self._seed, step=step, row=row)
            if self._rounding:
                self._rounding.set_shard(step=step, shard=index // self._shard_batches)

        def compute_loss(model: Any, own: int) -> Tensor:
            options = {"step": step, "index": self._global_index(own), "grad_output": grad_output}
            output = self.objective.losses(model, micro_batches[own].to(self._device), **options)
            loss_sum = output.losses.sum()
            for name, value in {"loss": loss_sum.detach(), **output.metric_sums}.items():
                sums.setdefault(name, []).append(value)
            return loss_sum * grad_output

        run = self._run if self._pipeline is None else self._run_pipeline
        run(micro_batches, prepare, compute_loss)
        self.grads = masters.gradients.total()
        means = self._read_back(sums, max(count, 1))
        norm = float(self._norms.double().square().sum().sqrt()) / masters.loss_scale
        return StepStats(
            loss=means.pop("loss"),
            grad_norm=norm,
            num_targets=count,
            num_rows=sum(size.num_rows for size in sizes),
            metrics=means,
        )

    def _first_own_row(self, num_rows: int) -> int:
        """Return the first row of a micro-batch that this rank computes."""
        return row_slice(num_rows, self._mesh.cp.rank, self._mesh.cp.size).start

    def _run(self, batches: Sequence[Any], prepare: Any, compute_loss: Any) -> None:
        """Compute the micro-batches one after another."""
        for own in range(len(batches)):
            last = own % self._shard_batches == self._shard_batches - 1
            if self._sharded:
                self._sharded.set_sync(last)
            prepare(self.model, own)
            loss = compute_loss(self.model, own)
            self.hooks.after_forward(own)
            loss.backward()
            self.hooks.after_backward(own)
            if last:
                rounding = None if self._sharded else self._rounding  # ranks round what they send
                self.master_weights.gradients.end_shard(rounding.round if rounding else None)

    def _run_pipeline(self, batches: Sequence[Any], prepare: Any, compute_loss: Any) -> None:
        """Compute the micro-batches in the order of the schedule."""
        from ingot.parallel.pipeline import PipelineStep

        def end_shard(grads: dict[str, Tensor]) -> None:
            for name, grad in grads.items():
                self.master_weights.gradients.add(name, grad)
            self.master_weights.gradients.end_shard()

        assert self._pipeline is not None
        inputs = [
            (batch.tokens.to(self._device), BatchLayout.packed(batch.lengths, self._device))
            for batch in batches
        ]
        self._pipeline.run(PipelineStep(inputs, prepare, compute_loss, end_shard))

    def _global_index(self, own: int, rank: int | None = None) -> int:
        """Return the index in the global batch of a micro-batch of this rank, or of another."""
        shard, within = divmod(own, self._shard_batches)
        rank = self._ranks.rank if rank is None else rank
        return (shard * self._ranks.size + rank) * self._shard_batches + within

    def _in_global_order(self, by_rank: list[list[float]]) -> list[float]:
        """Return values of micro-batches, given by rank, in the order of the global batch."""
        values = {
            self._global_index(own, rank): value
            for rank, values in enumerate(by_rank)
            for own, value in enumerate(values)
        }
        return [values[index] for index in range(len(values))]

    def _exchange_sizes(self, micro_batches: Sequence[Batch]) -> list[_Size]:
        """Return the sizes of all micro-batches of the global batch."""
        targets = self._ranks.gather([self.objective.num_targets(b) for b in micro_batches])
        rows = self._ranks.gather([num_rows(batch) for batch in micro_batches])
        sizes: list[_Size] = []
        first = 0
        both = zip(self._in_global_order(targets), self._in_global_order(rows), strict=True)
        for num_targets, count in both:
            sizes.append(_Size(int(num_targets), int(count), first))
            first += int(count)
        return sizes

    def _read_back(self, sums: dict[str, list[Tensor]], count: int) -> dict[str, float]:
        """Copy the sums of all micro-batches and the gradient norms to the host, in one copy;
        return the mean over `count` targets of each metric."""
        values, norms = [one for some in sums.values() for one in some], self._grad_norms()
        dtype = torch.promote_types(values[0].dtype, norms.dtype) if values else norms.dtype
        numbers = torch.cat([value.to(dtype).view(1) for value in values] + [norms.to(dtype)]).cpu()
        self._norms = numbers[len(values) :].to(norms.dtype)
        remaining = iter(numbers.tolist())
        own = {name: [next(remaining) for _ in some] for name, some in sums.items()}
        if self._pipeline:
            own = self._pipeline.share(own)
        return {
            name: sum(self._in_global_order(self._ranks.gather(some))) / count
            for name, some in own.items()
        }

    def clear_grads(self) -> None:
        """Free the gradients."""
        self.master_weights.gradients.clear()
        self.grads = {}

    def optimizer_step(self, lr_factor: float) -> dict[str, float]:
        """Update the weights and free the gradients; `lr_factor` scales the learning rate.

        Returns `clip_factor`, the smallest by which a gradient was scaled (1 means that none was
        clipped), and the numbers of `ingot.training.statistics`.
        """
        scale = self.master_weights.loss_scale
        factors = self.clipper.factors(self._norms / scale)
        by_name = dict(zip(self._names, (factors / scale).tolist(), strict=True))
        row_stats: dict[str, Tensor] | None = {} if self.optimizers.has_row_stats else None
        self.optimizers.step(self.grads, by_name, lr_factor, row_stats)
        statistics = {} if row_stats is None else self._summarize(row_stats)
        self.master_weights.copy_to_model()
        self.hooks.after_optimizer_step()
        return {"clip_factor": float(factors.min()), **statistics}

    def _summarize(self, row_stats: dict[str, Tensor]) -> dict[str, float]:
        """Return the statistics of an update of the weights of all ranks."""
        sharded, weights = self._sharded, self.optimizers.weights
        if sharded is not None:
            row_stats = {name: rows for name, rows in row_stats.items() if sharded.owns(name)}
        sizes = {name: weights[name].numel() for name in row_stats}
        return summarize(row_stats, sizes, self._names, self._mesh.world)

    def _grad_norms(self) -> Tensor:
        """Return the norm of each weight's gradient, still scaled; 0 for weights without one."""
        none = torch.zeros(0, device=self._device)
        sharded, grads = self._sharded, self.grads
        if sharded is not None:
            grads = {name: grad for name, grad in grads.items() if sharded.owns(name)}
        return grad_norms([grads.get(name, none) for name in self._names], self._mesh.world)


def merge_stats(stats: StepStats, replicas: Ranks) -> StepStats:
    """Return the numbers of a batch of which each replica has computed a part.

    The gradient norm is the largest of those of the replicas.

    >>> merge_stats(StepStats(loss=2.0, grad_norm=1.0, num_targets=8, num_rows=8), Ranks()).loss
    2.0
    """
    names = ["loss", *stats.metrics]
    means = [stats.loss, *stats.metrics.values()]
    numbers = [stats.grad_norm, stats.num_targets, stats.num_rows, *means]
    norms, targets, rows, *others = zip(*replicas.gather(numbers), strict=True)
    total = max(sum(targets), 1)
    merged = {
        name: sum(mean * count for mean, count in zip(values, targets, strict=True)) / total
        for name, values in zip(names, others, strict=True)
    }
    return StepStats(
        loss=merged.pop("loss"),
        grad_norm=max(norms),
        num_targets=int(sum(targets)),
        num_rows=int(sum(rows)),
        metrics=merged,
    )


def num_rows(batch: Batch) -> int:
    """Return the number of tokens or samples of a batch."""
    return len(batch.tokens) if isinstance(batch, TokenBatch) else len(batch.y)
