"""One parallel layout of a training run.

The GPUs form a grid, from the outermost axis to the innermost: pp, dp, fsdp, cp, tp. Experts are
spread over `ep` neighbours of the data-parallel GPUs, so `ep` is not a factor of the grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ingot.planning.workload import TrainingWorkload

Recompute = Literal["none", "attention", "selective", "third", "full"]
"""Which activations are computed again in the backward:

    none       none
    attention  the core attention, as Megatron's selective recomputation
    selective  about half of the matmuls and all elementwise ops, as in torchtitan and ingot
    third      every third block
    full       all, from the input of each block
"""


@dataclass(frozen=True, kw_only=True)
class Software:
    """What a training framework does; the defaults are those of a current framework.

    >>> Software().attention
    'fused'
    """

    attention: Literal["fused", "fa2", "fa1", "unfused"] = "fused"
    """The attention kernel; "fused" is the fastest for the GPU."""
    eager: bool = False
    """Whether elementwise ops run one by one, without fusion."""
    sequence_parallel: bool = True
    """Whether tensor parallelism shards the activations between its matmuls, too."""
    regather: bool = False
    """Whether the backward gathers these activations again instead of keeping them (Megatron)."""
    tp_overlap: bool = False
    """Whether the communication of tensor parallelism overlaps with matmuls (async TP)."""
    dp_overlap: bool = True
    """Whether gradients are reduced during the backward."""
    graphs: bool = False
    """Whether a step is replayed from CUDA graphs, so that launching kernels takes no time."""
    zero: Literal[0, 1, 3] = 0
    """Sharding over `dp`: 1 for optimizer states (ZeRO-1). 3 marks FSDP where `fsdp` is 1."""


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """Degrees of parallelism, micro-batch size and recomputation.

    >>> plan = ParallelPlan(fsdp=8, tp=2)
    >>> plan.gpus, plan.data_ranks
    (16, 8)
    """

    dp: int = 1
    """Replicas of the (sharded) model."""
    fsdp: int = 1
    """GPUs that share one copy of weights, gradients and optimizer states."""
    tp: int = 1
    pp: int = 1
    vp: int = 1
    """Stages of a GPU in an interleaved pipeline."""
    cp: int = 1
    ep: int = 1
    micro_batch_size: int = 1
    """Sequences of a micro-batch."""
    recompute: Recompute = "none"
    software: Software = Software()

    @property
    def gpus(self) -> int:
        """GPUs of the layout."""
        return self.dp * self.fsdp * self.tp * self.pp * self.cp

    @property
    def data_ranks(self) -> int:
        """Groups of GPUs that read different sequences."""
        return self.dp * self.fsdp

    @property
    def is_fully_sharded(self) -> bool:
        """Whether weights are sharded over the data ranks (FSDP, ZeRO-3)."""
        return self.fsdp > 1 or self.software.zero == 3

    @property
    def gathers_once(self) -> bool:
        """Whether FSDP gathers the weights once in a step: a pipeline stage keeps them."""
        return self.is_fully_sharded and self.pp > 1

    @property
    def shards(self) -> int:
        """GPUs over which weights are sharded, besides tp and pp."""
        return self.fsdp * self.cp if self.is_fully_sharded else 1

    @property
    def state_shards(self) -> int:
        """GPUs over which optimizer states are sharded, besides tp and pp."""
        return self.data_ranks * self.cp if self.software.zero == 1 else self.shards

    @property
    def expert_split(self) -> int:
        """GPUs of a stage over which the experts are spread."""
        return self.ep if self.ep > 1 else self.tp

    @property
    def expert_shards(self) -> int:
        """GPUs over which FSDP shards the experts that one GPU computes with."""
        return self._without_experts(self.shards) if self.is_fully_sharded else 1

    @property
    def expert_state_shards(self) -> int:
        """GPUs over which the optimizer states of these experts are sharded."""
        is_sharded = self.software.zero == 1 or self.is_fully_sharded
        return self._without_experts(self.state_shards) if is_sharded else 1

    def _without_experts(self, shards: int) -> int:
        """Return how many of the GPUs that share dense weights hold the same experts."""
        return max(1, shards * self.tp // self.expert_split)

    def micro_batches(self, workload: TrainingWorkload) -> int:
        """Return the number of micro-batches of a step."""
        return workload.global_batch_size // (self.data_ranks * self.micro_batch_size)

    def violation(self, workload: TrainingWorkload) -> str:
        """Return why the layout cannot run this workload; empty if it can.

        >>> from ingot.planning.workload import SHAPES
        >>> work = TrainingWorkload(model=SHAPES["llama3-8b"], seq_len=8192, global_batch_size=8)
        >>> ParallelPlan(tp=3).violation(work)
        'tp 3 does not divide 32 heads'
        """
        model = workload.model
        samples = self.data_ranks * self.micro_batch_size
        checks = (
            (model.heads % self.tp, f"tp {self.tp} does not divide {model.heads} heads"),
            (
                model.kv_heads % self.tp and self.tp % model.kv_heads,
                f"tp {self.tp} does not divide {model.kv_heads} key-value heads",
            ),
            (
                self.pp * self.vp > model.layers,
                f"{self.pp * self.vp} pipeline stages for {model.layers} layers",
            ),
            (
                workload.seq_len % (2 * self.cp) if self.cp > 1 else 0,
                f"2 x cp {self.cp} does not divide the sequence length {workload.seq_len}",
            ),
            (
                max(model.experts, 1) % self.ep,
                f"ep {self.ep} does not divide {model.experts} experts",
            ),
            (
                (self.data_ranks * self.cp * self.tp) % self.ep,
                f"ep {self.ep} does not divide {self.data_ranks * self.cp * self.tp} GPUs of a "
                "stage",
            ),
            (
                workload.global_batch_size % samples,
                f"{self.data_ranks} data ranks x micro-batch {self.micro_batch_size} does not "
                f"divide the global batch of {workload.global_batch_size}",
            ),
        )
        return next((text for failed, text in checks if failed), "")

    def describe(self) -> str:
        """Return the layout in one line, without the degrees that are 1.

        >>> ParallelPlan(fsdp=8, tp=2, recompute="full").describe()
        'fsdp 8, tp 2, micro-batch 1, recompute full'
        """
        names = ("dp", "fsdp", "tp", "pp", "vp", "cp", "ep")
        parts = [f"{name} {getattr(self, name)}" for name in names if getattr(self, name) > 1]
        parts.append(f"micro-batch {self.micro_batch_size}")
        if self.recompute != "none":
            parts.append(f"recompute {self.recompute}")
        return ", ".join(parts)
