"""Step time of a plan: the work of one GPU, counted, and the rates at which it is done, fitted.

`count_work` counts what one GPU does in a step, in seconds at the rates of the data sheet. It has
no fitted numbers. `step_time` turns these seconds into a step time with the `Constants`, which
`ingot.planning.fit` fits to published runs. For one micro-batch:

    layer  = matmul + elementwise + attention + exposed communication (tp, cp, ep, fsdp)
    stage  = layers / pp * layer + LM head / pp
    step   = (micro-batches * slowest stage + (pp - 1) / vp * stage + gradients + optimizer)
             * (1 + scale * log2(GPUs / 8))

Bytes count as much as FLOPs: elementwise ops and the operands of matmuls are read and written at
the bandwidth of the memory. Communication that overlaps with compute is exposed where it is longer,
and costs a share of its time where it is not. The transfers between pipeline stages are not
counted: published runs hide them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ingot.planning.hardware import Cluster
from ingot.planning.plan import ParallelPlan
from ingot.planning.workload import ModelShape, TrainingWorkload

STREAM = 0.8
"""Share of the data sheet's memory bandwidth that a streaming kernel reaches."""
_BACKWARD_BYTES = 1.6
"""Bytes of the elementwise ops in the backward, relative to the forward."""
_BACKWARD_ATTENTION = 2.5
"""FLOPs of attention in the backward, relative to the forward: one matmul is repeated."""
_ALL_TO_ALL = 0.6
"""Bandwidth of an all-to-all on NVLink, relative to a ring."""
_HALF_RATE = {"fused": 450.0, "fa2": 450.0, "fa1": 1300.0, "unfused": 0.0}
"""Sequence length at which an attention kernel reaches half of its rate for long sequences."""
_RAMP_BYTES = 8e6
"""Size of a message at which a collective reaches half of its bandwidth."""
_HIDDEN_BY = 0.9
"""Share of a micro-batch during which gradients can be reduced."""
_WITH_GRAPHS = 0.15
"""Time to launch an MoE layer with CUDA graphs, relative to without."""

_REPEATED = {
    "none": (0.0, 0.0, 0.0),
    "attention": (0.0, 1.0, 0.0),
    "selective": (0.5, 0.0, 1.0),
    "third": (1 / 3, 1 / 3, 1 / 3),
    "full": (1.0, 1.0, 1.0),
}
"""Share of the forward that is repeated: matmuls, attention, elementwise ops."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The fitted numbers of the model. Each is a ratio except `moe_launch`.

    >>> Constants().speed
    1.0
    """

    matmul: float = 0.9
    """Rate of matmuls in a layer, relative to the best measured matmul of the GPU."""
    fp8: float = 0.95
    """The same in fp8, relative to bf16."""
    fp4: float = 0.75
    """The same in fp4, relative to bf16."""
    attention: float = 0.76
    """Rate of attention, relative to the published rate of the kernel."""
    elementwise: float = 1.2
    """Bytes that elementwise ops move, relative to the bytes counted."""
    eager: float = 2.2
    """Bytes of eager elementwise ops, relative to fused ones."""
    operands: float = 0.5
    """Share of the time to move the operands of a matmul that is not hidden by its FLOPs."""
    tp_exposed: float = 0.25
    """Share of the communication of tensor parallelism that is exposed although it overlaps."""
    nvlink: float = 0.7
    """Share of the bandwidth of NVLink that a collective reaches."""
    network: float = 0.8
    """Share of the bandwidth of the network that a collective reaches."""
    overlap: float = 0.2
    """Share of overlapped communication that still costs time."""
    all_to_all: float = 0.2
    """Share of the all-to-all of experts that is exposed."""
    moe_launch: float = 0.009
    """Seconds in which the CPU launches the kernels of an MoE layer, forward and backward."""
    scale: float = 0.009
    """Slowdown for each doubling of the GPUs beyond 8."""
    speed: float = 1.0
    """Step time of a user's own system, relative to that of published runs; from calibration."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one GPU does, in seconds at the data sheet's rates; per layer and micro-batch, forward
    and backward, unless said otherwise. The fields of several plans may be stacked to arrays."""

    micro_batches: float
    layers: float
    """Layers of the model."""
    max_layers: float
    """Layers of the largest pipeline stage."""
    last_layers: float
    """Layers of the last stage, which has the LM head, too."""
    pp: float
    vp: float
    gpus: float
    matmul_bf16: float
    matmul_fp8: float
    matmul_fp4: float
    operands: float
    attention: float
    elementwise: float
    eager: float
    tp: float
    tp_overlap: float
    cp_nvlink: float
    cp_network: float
    ep_nvlink: float
    ep_network: float
    fsdp_nvlink: float
    fsdp_network: float
    moe_share: float
    """Share of the layers that have experts."""
    launch: float
    """Time to launch an MoE layer, relative to `Constants.moe_launch`."""
    head_matmul: float
    """Of the LM head, per micro-batch."""
    head_operands: float
    head_elementwise: float
    dp_nvlink: float
    """Of the gradients, per step."""
    dp_network: float
    dp_overlap: float
    optimizer: float
    """Per step."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of a step by part; arrays if the work was stacked.

    Each part is what remains visible: communication that is hidden by compute is not in it.
    """

    matmul: float
    attention: float
    elementwise: float
    tensor_parallel: float
    context_parallel: float
    expert_parallel: float
    fsdp: float
    launch: float
    """Waiting for the CPU to launch the kernels of MoE layers."""
    imbalance: float
    """Waiting for the slowest pipeline stage."""
    bubble: float
    """Filling and draining the pipeline."""
    gradients: float
    """Reduction of gradients over data-parallel ranks."""
    optimizer: float
    scale: float
    """Stragglers and other costs of many GPUs."""

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(vars(self).values())

    @property
    def communication(self) -> float:
        """Seconds of exposed communication."""
        parts = (self.tensor_parallel, self.context_parallel, self.expert_parallel)
        return sum(parts) + self.fsdp + self.gradients


PARTS = tuple(field.name for field in fields(StepTime))
"""Names of the parts of a step."""


def predict(
    workload: TrainingWorkload, plan: ParallelPlan, cluster: Cluster, constants: Constants
) -> StepTime:
    """Return the step time of a plan by part.

    >>> from ingot.planning.hardware import ACCELERATORS
    >>> from ingot.planning.workload import SHAPES
    >>> cluster = Cluster(accelerator=ACCELERATORS["h100"], gpus=8)
    >>> work = TrainingWorkload(model=SHAPES["llama3-8b"], seq_len=8192, global_batch_size=128)
    >>> bool(8 < predict(work, ParallelPlan(fsdp=8), cluster, Constants()).total < 20)
    True
    """
    return step_time(count_work(workload, plan, cluster), constants)


def stack(works: Sequence[Work]) -> Work:
    """Return the work of several plans with arrays as fields."""
    columns = np.array([list(vars(work).values()) for work in works], dtype=np.float64).T
    names = (field.name for field in fields(Work))
    return Work(**dict(zip(names, columns, strict=True)))


def step_time(work: Work, c: Constants) -> StepTime:
    """Return the step time by part."""
    low_precision = work.matmul_fp8 / c.fp8 + work.matmul_fp4 / c.fp4
    matmul = (work.matmul_bf16 + low_precision) / c.matmul + c.operands * work.operands
    bytes_factor = c.elementwise * (1 + (c.eager - 1) * work.eager)
    elementwise = bytes_factor * work.elementwise
    attention = work.attention / c.attention
    compute = matmul + elementwise + attention
    tp = work.tp / c.nvlink * (1 - work.tp_overlap * (1 - c.tp_exposed))
    cp = _exposed(_slower(work.cp_nvlink, work.cp_network, c), attention, c.overlap)
    ep = c.all_to_all * _slower(work.ep_nvlink / _ALL_TO_ALL, work.ep_network, c)
    # Not `compute`: attention would hide cp and fsdp at the same time.
    visible = compute + tp + cp + ep
    fsdp = _exposed(_slower(work.fsdp_nvlink, work.fsdp_network, c), visible, c.overlap)
    busy = visible + fsdp
    floor = c.moe_launch * work.launch
    launch = work.moe_share * ((busy**4 + floor**4) ** 0.25 - busy)
    layer = busy + launch

    head_matmul = work.head_matmul / c.matmul + c.operands * work.head_operands
    head_elementwise = bytes_factor * work.head_elementwise
    head = head_matmul + head_elementwise
    stage = (work.layers * layer + head) / work.pp
    slowest = np.maximum(work.max_layers * layer, work.last_layers * layer + head)
    gradients = _slower(work.dp_nvlink, work.dp_network, c)
    gradients = np.maximum(gradients - work.dp_overlap * _HIDDEN_BY * stage, 0.0)

    often = work.micro_batches / work.pp
    per_layer = often * work.layers
    parts: dict[str, Any] = {
        "matmul": per_layer * matmul + often * head_matmul,
        "attention": per_layer * attention,
        "elementwise": per_layer * elementwise + often * head_elementwise,
        "tensor_parallel": per_layer * tp,
        "context_parallel": per_layer * cp,
        "expert_parallel": per_layer * ep,
        "fsdp": per_layer * fsdp,
        "launch": per_layer * launch,
        "imbalance": work.micro_batches * np.maximum(slowest - stage, 0.0),
        "bubble": (work.pp - 1) / work.vp * stage,
        "gradients": gradients,
        "optimizer": work.optimizer,
    }
    scale = c.scale * np.maximum(np.log2(work.gpus / 8), 0.0) * sum(parts.values())
    return StepTime(**{name: c.speed * part for name, part in {**parts, "scale": scale}.items()})


def _slower(nvlink: float, network: float, c: Constants) -> Any:
    return np.maximum(nvlink / c.nvlink, network / c.network)


def _exposed(communication: Any, compute: float, share: float) -> Any:
    hidden = np.minimum(communication, compute)
    return communication - hidden + share * hidden


def count_work(workload: TrainingWorkload, plan: ParallelPlan, cluster: Cluster) -> Work:
    """Count the work of one GPU in a step."""
    layer = _count_layer(workload, plan, cluster)
    head = _count_head(workload, plan, cluster)
    step = _count_step(workload.model, plan, cluster)
    model = workload.model
    largest = math.ceil(model.layers / plan.pp)
    spare = plan.pp * largest - model.layers
    return Work(
        micro_batches=plan.micro_batches(workload),
        layers=model.layers,
        max_layers=largest,
        last_layers=max(largest - spare, 0),
        pp=plan.pp,
        vp=plan.vp,
        gpus=plan.gpus,
        moe_share=model.moe_layers / model.layers,
        launch=_WITH_GRAPHS if plan.software.graphs else 1.0,
        eager=float(plan.software.eager),
        tp_overlap=float(plan.software.tp_overlap),
        dp_overlap=float(plan.software.dp_overlap),
        **layer,
        **head,
        **step,
    )


def tokens_per_micro_batch(workload: TrainingWorkload, plan: ParallelPlan) -> float:
    """Return the tokens of a micro-batch on one GPU."""
    return plan.micro_batch_size * workload.seq_len / plan.cp


def _memory_seconds(num_bytes: float, cluster: Cluster) -> float:
    return num_bytes / (STREAM * cluster.accelerator.memory_tb_s * 1e12)


def _count_layer(
    workload: TrainingWorkload, plan: ParallelPlan, cluster: Cluster
) -> dict[str, float]:
    """Count an average layer: mixtures of experts may have a few dense layers."""
    model, gpu = workload.model, cluster.accelerator
    repeated, repeated_attention, _ = _REPEATED[plan.recompute]
    tokens = tokens_per_micro_batch(workload, plan)
    flops = 2 * tokens * _active_weights(model) / plan.tp * (3 + repeated)
    rates = {
        "bf16": gpu.bf16_tflops * gpu.matmul_share,
        "fp8": (gpu.fp8_tflops or gpu.bf16_tflops) * gpu.fp8_matmul_share,
        "fp4": (gpu.fp4_tflops or gpu.bf16_tflops) * gpu.fp8_matmul_share,
    }
    kind = workload.precision.removeprefix("mx")
    attention = tokens * workload.seq_len * model.window * (model.q_dim + model.o_dim) / plan.tp
    attention *= 1 + _BACKWARD_ATTENTION + repeated_attention
    attention *= 1 + _HALF_RATE[plan.software.attention] / workload.seq_len
    kernels = {
        "fused": gpu.attention_tflops,
        "fa2": gpu.fa2_tflops or gpu.attention_tflops,
        "fa1": gpu.fa1_tflops or gpu.attention_tflops,
        # Two batched matmuls that compute the masked half, too.
        "unfused": 0.5 * STREAM * rates["bf16"],
    }
    links = _count_links(workload, plan, cluster)
    return {
        **{f"matmul_{name}": 0.0 for name in rates},
        f"matmul_{kind}": flops / (rates[kind] * 1e12),
        "operands": _memory_seconds(_operand_bytes(workload, plan), cluster),
        "attention": attention / (kernels[plan.software.attention] * 1e12),
        "elementwise": _memory_seconds(_elementwise_bytes(workload, plan), cluster),
        **links,
    }


def _active_weights(model: ModelShape) -> float:
    """Return the weights of an average layer that a token is multiplied with."""
    experts = model.moe_layers * model.top_k * model.ffn_matrices * model.dim * model.expert_dim
    return (model.dense_weights + experts) / model.layers


def _matmul_bytes(
    rows: float, inner: float, columns: float, width: int, copies: float = 1.0
) -> tuple[float, float]:
    """Return the bytes of the operands and results of a matmul: forward, and both of backward.

    The gradient of a weight is read and written in float32.
    """
    x, w, y = rows * inner, copies * inner * columns, rows * columns
    return width * (x + w) + 2 * y, width * (2 * y + x + w) + 2 * x + 8 * w


def _operand_bytes(workload: TrainingWorkload, plan: ParallelPlan) -> float:
    model, tp = workload.model, plan.tp
    tokens = tokens_per_micro_batch(workload, plan)
    width = 2 if workload.precision == "bf16" else 1
    moe = model.moe_layers / model.layers
    dense = (1 - moe) * model.ffn_dim + moe * model.shared_dim
    routed, local = tokens * model.top_k / tp, model.experts / plan.ep
    up = model.ffn_matrices - 1
    matmuls = [
        _matmul_bytes(tokens, model.dim, (model.q_dim + model.kv_dim) / tp, width),
        _matmul_bytes(tokens, model.o_dim / tp, model.dim, width),
        _matmul_bytes(tokens, model.dim, up * dense / tp, width),
        _matmul_bytes(tokens, dense / tp, model.dim, width),
    ]
    if model.experts:
        inner, outer = model.dim, model.expert_dim
        experts = (
            _matmul_bytes(routed, inner, up * outer, width, local),
            _matmul_bytes(routed, outer, inner, width, local),
        )
        matmuls += [(moe * forward, moe * backward) for forward, backward in experts]
    repeated = _REPEATED[plan.recompute][0]
    return sum((1 + repeated) * forward + backward for forward, backward in matmuls)


def _elementwise_bytes(workload: TrainingWorkload, plan: ParallelPlan) -> float:
    """Count the reads and writes of norms, residuals, RoPE, activations, casts and routing."""
    model, tp = workload.model, plan.tp
    tokens = tokens_per_micro_batch(workload, plan)
    sp = tp if plan.software.sequence_parallel else 1
    moe = model.moe_layers / model.layers
    dense = (1 - moe) * model.ffn_dim + moe * model.shared_dim
    heads = model.q_dim + model.kv_dim
    forward = tokens * (28 * model.dim / sp + 6 * heads / tp)
    forward += tokens * 2 * (model.ffn_matrices + 1) * dense / tp
    forward += moe * tokens * model.top_k / tp * 2 * (8 * model.dim + 4 * model.expert_dim)
    if workload.precision != "bf16":
        casts = 4 * model.dim / sp + 2 * model.q_dim / tp + 3 * dense / tp
        casts += 3 * moe * model.top_k * model.expert_dim / tp
        forward += tokens * casts * (1.5 if workload.precision == "mxfp8" else 1.0)
    _, repeated_attention, repeated = _REPEATED[plan.recompute]
    total = forward * (1 + _BACKWARD_BYTES + repeated)
    if plan.software.attention == "unfused":
        scores = 16 * tokens * workload.seq_len * model.heads / tp
        total += scores * (1 + 1.2 + repeated_attention)
    return total


def _count_links(
    workload: TrainingWorkload, plan: ParallelPlan, cluster: Cluster
) -> dict[str, float]:
    """Count the communication of a layer: tp, cp, ep and fsdp."""
    model, tp = workload.model, plan.tp
    tokens = tokens_per_micro_batch(workload, plan)
    message = 2 * tokens * model.dim
    # Forward: one all-reduce after attention and one after the MLP, or as much in all-gathers and
    # reduce-scatters. Backward: the same; inputs that were not kept are gathered again.
    count = 4.5 if plan.software.regather else 4.0
    count += 2 * _REPEATED[plan.recompute][0]
    ring = 2 * (tp - 1) / tp * (message + _RAMP_BYTES) * count
    nvlink, network = cluster.transfer(ring, tp, stride=1)
    keys = 3 * (plan.cp - 1) * tokens * model.kv_dim * 2 / tp
    cp = cluster.transfer(keys, plan.cp, stride=tp, shared=False)
    routed = 8 * tokens / tp * model.dim * model.moe_layers / model.layers
    copies = model.top_k * (plan.ep - 1) / plan.ep
    ep = cluster.transfer(routed * copies, plan.ep, stride=tp, shared=False)
    # A token crosses the network once for each node that has some of its experts.
    nodes = max(1.0, plan.ep * tp / cluster.per_node)
    remote = (nodes - 1) * (1 - (1 - 1 / nodes) ** model.top_k)
    remote_share = remote / copies if copies else 0.0
    # Weights are gathered twice, and gradients reduced once, for each micro-batch.
    dense, experts = _local_weights(model, plan)
    gathered = dense * (1 - 1 / plan.shards) + experts * (1 - 1 / plan.expert_shards)
    gathered *= 0 if plan.gathers_once else 6 / model.layers
    fsdp = cluster.transfer(gathered, plan.shards, stride=tp)
    return {
        "tp": max(nvlink, network),
        "cp_nvlink": cp[0],
        "cp_network": cp[1],
        "ep_nvlink": ep[0],
        "ep_network": ep[1] * remote_share,
        "fsdp_nvlink": fsdp[0],
        "fsdp_network": fsdp[1],
    }


def _local_weights(model: ModelShape, plan: ParallelPlan) -> tuple[float, float]:
    """Return the dense weights and those of experts of all layers on one GPU, if pp were 1.

    With FSDP: those that it has gathered.
    """
    return model.dense_weights / plan.tp, model.expert_weights / plan.expert_split


def _count_head(
    workload: TrainingWorkload, plan: ParallelPlan, cluster: Cluster
) -> dict[str, float]:
    """Count the LM head and the loss."""
    model, gpu = workload.model, cluster.accelerator
    tokens, rows = tokens_per_micro_batch(workload, plan), model.vocab_size / plan.tp
    flops = 6 * tokens * model.dim * rows
    forward, backward = _matmul_bytes(tokens, model.dim, rows, 2)
    return {
        "head_matmul": flops / (gpu.bf16_tflops * gpu.matmul_share * 1e12),
        "head_operands": _memory_seconds(forward + backward, cluster),
        # Logits: converted to float32, read for the loss, read and written for the gradient.
        "head_elementwise": _memory_seconds(14 * tokens * rows, cluster),
    }


def _count_step(model: ModelShape, plan: ParallelPlan, cluster: Cluster) -> dict[str, float]:
    """Count what happens once in a step: reducing gradients over replicas, and the optimizer."""
    dense, experts = (weights / plan.pp for weights in _local_weights(model, plan))
    dense += model.embedding_weights / plan.tp
    size, stride, local = plan.data_ranks * plan.cp, plan.tp, dense + experts
    if plan.is_fully_sharded and not plan.gathers_once:
        # Replicas of FSDP groups reduce what each GPU holds.
        local = dense / plan.shards + experts / plan.expert_shards
        size, stride = plan.dp, plan.tp * plan.shards
    dp = cluster.transfer(4 * local * (size - 1) / size, size, stride=stride)
    states = dense / plan.state_shards + experts / plan.expert_state_shards
    return {
        "dp_nvlink": dp[0],
        "dp_network": dp[1],
        "optimizer": _memory_seconds(30 * states + 4 * local, cluster),
    }
