"""Pipeline parallelism with torch's stages and schedules, with the bits of a single process.

The ranks of `pp` have different layers (`ingot.parallel.stage`). Micro-batches pass through the
stages one after another: a stage sends its output to the next, and gets the gradient of it back.
A schedule is the order of forwards and backwards, in which the ranks wait little for each other.

Each stage computes the backwards in the order of the micro-batches, and sums their gradients in
this order, as one process does. All micro-batches of a step are one run of the schedule: after the
last one of each shard (`ingot.training.gradients`), the ranks that share the stage sum its
gradients, while other micro-batches are on their way.

torch's stages keep a receive buffer for each micro-batch, of one shape. Here they are allocated
when a micro-batch arrives and freed after its backward, so that lengths may differ.

This module imports torch's compiler, through torch's: import it only for a pipeline.
"""

# pyright: basic
from __future__ import annotations

import json
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from ingot.nn.layout import BatchLayout
from ingot.parallel.config import Schedule
from ingot.parallel.ranks import Ranks, count_sent
from ingot.parallel.shard import ShardedModel
from ingot.parallel.stage import Stage

_SCHEDULES: dict[Schedule, Any] = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


@dataclass(frozen=True)
class HiddenStates:
    """A language model whose hidden states are known: see `ingot.nn.loss.LanguageModel`."""

    hidden_TD: Tensor
    lm_head_weight: Tensor

    def __call__(self, tokens_T: Tensor, layout: BatchLayout) -> Tensor:
        """Return the hidden states."""
        return self.hidden_TD


@dataclass(frozen=True)
class PipelineStep:
    """What a pipeline computes in a step; micro-batches are given by their index on this rank."""

    inputs: Sequence[tuple[Tensor, BatchLayout]]
    """Tokens and layout of each micro-batch."""
    before: Callable[[nn.Module, int], None]
    """Called before the forward of a micro-batch in a stage, and before its backward."""
    loss: Callable[[HiddenStates, int], Tensor]
    """Returns the loss of a micro-batch, of which the gradients are. Called in the last stage."""
    on_shard: Callable[[dict[str, Tensor]], None]
    """Takes the gradients of each shard, summed over the ranks, in the order of the shards."""


class Pipeline:
    """The stages of one rank; `sharded` is the model that they were cut from.

    A step has `num_micro_batches` micro-batches on this rank, `shard_batches` in a shard.
    """

    def __init__(
        self,
        stages: list[Stage],
        sharded: ShardedModel,
        schedule: Schedule,
        num_micro_batches: int,
        shard_batches: int,
    ) -> None:
        self._stages, self._sharded, self._ranks = stages, sharded, sharded.mesh.pp
        self._count, self._shard_batches = num_micro_batches, shard_batches
        sharded.on_grad = self._take
        self._grads: dict[str, Tensor] = {}
        self._shards: list[list[dict[str, Tensor]]] = []
        self._step: PipelineStep | None = None
        runtimes = [_Runtime(stage, self) for stage in stages]
        self._runtimes = runtimes
        self._schedule = _SCHEDULES[schedule](
            runtimes[0] if schedule == "1f1b" else runtimes,
            num_micro_batches,
            loss_fn=self._loss,
            scale_grads=False,
        )

    @property
    def ranks(self) -> Ranks:
        """The ranks of the pipeline."""
        return self._ranks

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, and thus the losses."""
        return self._stages[-1].is_last

    def run(self, step: PipelineStep) -> None:
        """Compute the gradients of a step."""
        self._step, self._shards = step, []
        for runtime in self._runtimes:
            runtime.has_backward = True
            runtime.clear_runtime_states()
        # `step` would divide a batch itself, into micro-batches of one shape.
        self._schedule._step_microbatches(
            [(tokens,) for tokens, _ in step.inputs],
            [{"layout": layout} for _, layout in step.inputs],
            list(range(self._count)),
            return_outputs=False,
        )
        self._step = None

    def forward(self, tokens_T: Tensor, layout: BatchLayout) -> HiddenStates | None:
        """Return the hidden states of a batch on the rank of the last stage; None on others."""
        size = self._ranks.size
        for stage in self._stages:
            x = tokens_T
            if not stage.is_first:
                x = torch.empty(len(tokens_T), stage.dim, dtype=self._dtype)
                dist.recv(x, group=self._ranks.group, group_src=(stage.index - 1) % size)
            x = stage(x, layout)
            if stage.is_last:
                return HiddenStates(x, stage.lm_head.weight)  # pyright: ignore
            count_sent(x.nbytes)
            dist.send(x, group=self._ranks.group, group_dst=(stage.index + 1) % size)
        return None

    def share(self, values: dict[str, list[float]]) -> dict[str, list[float]]:
        """Return the numbers of the rank of the last stage."""
        return json.loads(self._ranks.share(json.dumps(values), source=self._ranks.size - 1))

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._stages[0].parameters()).dtype

    def _loss(self, hidden_TD: Tensor, micro_batch: int) -> Tensor:
        assert self._step is not None
        head: Any = self._stages[-1].lm_head
        return self._step.loss(HiddenStates(hidden_TD, head.weight), micro_batch)

    def _take(self, name: str, grad: Tensor) -> None:
        self._grads[name] = grad

    def before(self, stage: Stage, micro_batch: int) -> None:
        """Prepare a stage for a micro-batch."""
        assert self._step is not None
        self._step.before(stage, micro_batch)

    def num_rows(self, micro_batch: int) -> int:
        """Return the number of tokens of a micro-batch."""
        assert self._step is not None
        return len(self._step.inputs[micro_batch][0])

    def after_backward(self, stage: Stage, micro_batch: int) -> None:
        """Add the gradients of a micro-batch; at the end of a shard, sum them over the ranks."""
        shard, within = divmod(micro_batch, self._shard_batches)
        ends = within == self._shard_batches - 1
        self._sharded.add_grads(stage, sync=ends, last=micro_batch == self._count - 1)
        if ends:
            grads, self._grads = self._grads, {}
            self._end_shard(shard, grads)

    def _end_shard(self, shard: int, grads: dict[str, Tensor]) -> None:
        """Hand a shard on when all stages of this rank have ended it."""
        assert self._step is not None
        self._shards += [[] for _ in range(shard + 1 - len(self._shards))]
        self._shards[shard].append(grads)
        if len(self._shards[shard]) == len(self._stages):
            self._step.on_shard(dict(ChainMap(*self._shards[shard])))
            self._shards[shard] = []


class _Runtime(pipelining.PipelineStage):
    """torch's stage, for micro-batches of different lengths and several shards in a run."""

    def __init__(self, stage: Stage, pipeline: Pipeline) -> None:
        self._pipeline, self._stage = pipeline, stage
        dtype = next(stage.parameters()).dtype
        stream = torch.empty(1, stage.dim, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(1, dtype=torch.int64, device="meta")
        super().__init__(
            stage,
            stage.index,
            stage.num_stages,
            torch.device("cpu"),
            input_args=tokens if stage.is_first else stream,
            output_args=stream,
            group=pipeline.ranks.group,
        )
        self._empty = torch.empty(0, stage.dim, dtype=dtype)

    def _allocate(self, infos: tuple[Any, ...], micro_batch: int) -> None:
        for info in infos:
            if not info.is_root_arg:
                rows = self._pipeline.num_rows(micro_batch)
                info.buffer = self._empty.new_empty(rows, self._stage.dim)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.args_recv_info[fwd_chunk_id], fwd_chunk_id)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate(self.grad_recv_info[bwd_chunk_id], bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return _count(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return _count(super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        self._pipeline.before(self._stage, fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        self._pipeline.before(self._stage, bwd_chunk_id)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None
        if full_backward:
            self._pipeline.after_backward(self._stage, bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._pipeline.before(self._stage, bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id)
        self._pipeline.after_backward(self._stage, bwd_chunk_id)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: `after_backward` has summed the gradients of the last shard, too."""


def _count(sends: list[dist.P2POp]) -> list[dist.P2POp]:
    for one in sends:
        count_sent(one.tensor.nbytes)
    return sends
