"""Memory of one GPU by part: states of the weights, activations, logits. Nothing here is fitted.

Activations are counted as in "Reducing Activation Recomputation in Large Transformer Models"
(Korthikanti et al., 2022), extended to grouped-query attention, gated MLPs, experts, flash
attention and context parallelism. A pipeline stage holds the activations of as many micro-batches
as it has forwarded and not yet backwarded; the first and the last stage are compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from ingot.planning.cost import tokens_per_micro_batch
from ingot.planning.plan import ParallelPlan
from ingot.planning.workload import TrainingWorkload

GIB = 2**30
BUFFERS = GIB
"""CUDA context, NCCL and workspaces."""
_LOGIT_BYTES = 12
"""Of a logit: bf16 and float32, and the same of its gradient."""
_KEPT_BY_SELECTIVE = 0.55
"""Share of a layer's activations that selective recomputation keeps (torchtitan's every second
matmul; counted from its list of saved ops)."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Bytes of one GPU by part.

    >>> MemoryUse(weights=1, gradients=2, optimizer=3, activations=4, logits=5, buffers=6).total
    21
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float

    @property
    def total(self) -> float:
        """All bytes."""
        return sum(vars(self).values())

    @property
    def states(self) -> float:
        """Bytes of weights, gradients and optimizer states."""
        return self.weights + self.gradients + self.optimizer


MEMORY_PARTS = tuple(field.name for field in fields(MemoryUse))
"""Names of the parts of the memory."""


def predict_memory(workload: TrainingWorkload, plan: ParallelPlan) -> MemoryUse:
    """Return the memory of the GPU that needs most.

    >>> from ingot.planning.workload import SHAPES
    >>> work = TrainingWorkload(model=SHAPES["llama3-8b"], seq_len=8192, global_batch_size=16)
    >>> memory = predict_memory(work, ParallelPlan(fsdp=8, micro_batch_size=2))
    >>> round(memory.states / GIB, 1)
    15.9
    """
    stages = {0, plan.pp - 1}
    return max((_stage(workload, plan, stage) for stage in stages), key=lambda use: use.total)


def _stage(workload: TrainingWorkload, plan: ParallelPlan, stage: int) -> MemoryUse:
    model, is_last = workload.model, stage == plan.pp - 1
    layers = _layers_of(model.layers, plan.pp, stage)
    share = layers / model.layers
    ends = (stage == 0) + (is_last and not (model.tied and plan.pp == 1))
    dense = share * model.dense_weights / plan.tp + ends * model.embedding_weights / plan.tp
    experts = share * model.expert_weights / plan.expert_split
    weights, tokens = dense + experts, tokens_per_micro_batch(workload, plan)
    held = dense / plan.state_shards + experts / plan.expert_state_shards
    if plan.is_fully_sharded:
        # Float32 weights, gradients and two moments; in bf16, the layer in use and the next.
        states = [4 * held, 4 * held, 8 * held]
        states[0] += 2 * (weights if plan.gathers_once else 2 * weights / max(layers, 2))
        if plan.gathers_once:  # and gradients are reduced after the last micro-batch
            states[1] += 4 * weights
    else:
        states = [2 * weights, 4 * weights, 12 * held]
    return MemoryUse(
        weights=states[0],
        gradients=states[1],
        optimizer=states[2],
        activations=tokens * layers * _in_flight(workload, plan, stage) * _kept(workload, plan)
        + tokens * _recomputed_at_once(workload, plan),
        logits=_LOGIT_BYTES * tokens * model.vocab_size / plan.tp if is_last else 0.0,
        buffers=BUFFERS,
    )


def _layers_of(layers: int, pp: int, stage: int) -> int:
    """Return the layers of a stage; the last has fewer if they do not divide evenly."""
    largest = math.ceil(layers / pp)
    return largest if stage < pp - 1 else max(layers - (pp - 1) * largest, 1)


def _in_flight(workload: TrainingWorkload, plan: ParallelPlan, stage: int) -> float:
    """Return how many micro-batches a stage holds: fewer the later it is (1F1B)."""
    waiting = plan.pp - stage
    if plan.vp > 1 and stage == 0:
        waiting += (plan.pp - 1) / plan.vp
    return min(waiting, plan.micro_batches(workload))


def _layer_bytes(workload: TrainingWorkload, plan: ParallelPlan) -> float:
    """Return the activations of a token in one layer, if all are kept."""
    model, tp, software = workload.model, plan.tp, plan.software
    sp = tp if software.sequence_parallel else 1
    moe = model.moe_layers / model.layers
    dense = (1 - moe) * model.ffn_dim + moe * model.shared_dim
    # Inputs of both norms, of which eager ones keep a float32 copy, and of both first matmuls.
    total = (4 + 8 * software.eager) * model.dim / sp
    total += 4 * model.dim / (sp if software.regather else 1)
    total += 2 * (model.q_dim + model.kv_dim + model.o_dim) / tp
    total += 2 * model.ffn_matrices * dense / tp
    total += moe * model.top_k * 2 * (model.dim + model.ffn_matrices * model.expert_dim) / tp
    if software.attention == "unfused":
        total += 2 * model.dim / sp  # dropout masks, in the frameworks of that time
        if plan.recompute != "attention":
            total += 5 * model.heads * workload.seq_len / tp
    return total


def _kept(workload: TrainingWorkload, plan: ParallelPlan) -> float:
    """Return the bytes of a token in one layer that wait for the backward."""
    model = workload.model
    everything = _layer_bytes(workload, plan)
    sp = plan.tp if plan.software.sequence_parallel else 1
    inputs = 2 * model.dim / sp
    return {
        "none": everything,
        "attention": everything,
        "selective": _KEPT_BY_SELECTIVE * everything,
        "third": (2 * everything + inputs) / 3,
        "full": inputs,
    }[plan.recompute]


def _recomputed_at_once(workload: TrainingWorkload, plan: ParallelPlan) -> float:
    """Return the bytes of a token that recomputation holds for the layer in its backward."""
    return 0.0 if plan.recompute in ("none", "attention") else _layer_bytes(workload, plan)
