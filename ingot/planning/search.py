"""Enumerates the plans for a cluster, keeps those that fit into memory, and ranks them.

Plans whose predicted times differ by less than 5 % are equally good as far as the model can
say. Among them, the one with the smallest tp x pp comes first: it depends least on links.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ingot.core.errors import ConfigError
from ingot.planning.accuracy import TIE
from ingot.planning.cost import PARTS, StepTime, count_work, stack, step_time
from ingot.planning.fit import FittedModel
from ingot.planning.hardware import Cluster
from ingot.planning.memory import GIB, MemoryUse, predict_memory
from ingot.planning.plan import ParallelPlan, Recompute, Software
from ingot.planning.workload import TrainingWorkload

USABLE = 0.93
"""Share of a GPU's memory that a plan may use; fragmentation takes the rest."""
_MAX_MICRO_BATCH = 16
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class PlanEstimate:
    """A plan with its predicted step time and memory."""

    plan: ParallelPlan
    workload: TrainingWorkload
    time: StepTime
    memory: MemoryUse
    peak_flops: float
    """bf16 peak of one GPU."""
    interval: tuple[float, float]
    """Measured over predicted step time, in which 80 % of published runs were."""

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.time.total

    @property
    def low(self) -> float:
        """Lower end of the interval in seconds."""
        return self.interval[0] * self.step_s

    @property
    def high(self) -> float:
        """Upper end of the interval in seconds."""
        return self.interval[1] * self.step_s

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization, relative to the bf16 peak."""
        return self.workload.flops_per_step / self.step_s / self.plan.gpus / self.peak_flops

    @property
    def tokens_per_gpu_s(self) -> float:
        """Tokens per second of one GPU."""
        return self.workload.tokens_per_step / self.step_s / self.plan.gpus

    def gpu_hours(self, tokens: float) -> float:
        """Return the GPU-hours to train on this many tokens."""
        return tokens / self.tokens_per_gpu_s / 3600


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The plans that fit, best first, and what was left out."""

    estimates: tuple[PlanEstimate, ...]
    """One for each combination of degrees, with its best micro-batch size and recomputation."""
    considered: int
    """Plans that are possible for the model and the batch."""
    too_large: int
    """Plans that need more memory than a GPU has."""
    nearest: tuple[ParallelPlan, MemoryUse] | None
    """The plan that is too large by least."""
    simplest: tuple[ParallelPlan, MemoryUse] | None
    """The simplest plan that is too large: least tp x pp, no recomputation."""


def enumerate_plans(
    workload: TrainingWorkload, cluster: Cluster, software: Software
) -> Iterator[ParallelPlan]:
    """Yield the plans that the model and the batch allow, whether or not they fit into memory."""
    model, gpus = workload.model, cluster.gpus
    for tp in _powers_of_two(min(cluster.per_node, 8, gpus)):
        for pp in _divisors(gpus // tp, model.layers):
            for cp in _powers_of_two(max(1, min(gpus // (tp * pp), workload.seq_len // 4096))):
                if gpus % (tp * pp * cp):
                    continue
                for plan in _data_layouts(gpus // (tp * pp * cp), tp, pp, cp, workload, cluster):
                    yield from _variants(plan, workload, software)


def _powers_of_two(limit: int) -> list[int]:
    """Return the powers of 2 up to a limit."""
    return [1 << k for k in range(max(limit, 1).bit_length())]


def _divisors(number: int, limit: int) -> list[int]:
    return [k for k in range(1, min(number, limit, 64) + 1) if number % k == 0]


def _data_layouts(
    ranks: int, tp: int, pp: int, cp: int, workload: TrainingWorkload, cluster: Cluster
) -> Iterator[ParallelPlan]:
    inside = max(1, cluster.per_node // (tp * cp))
    shards = {1, ranks, inside if ranks % inside == 0 else ranks}
    experts = workload.model.experts
    for fsdp in sorted(shards):
        for ep in _powers_of_two(min(experts, 64)) if experts else [1]:
            yield ParallelPlan(dp=ranks // fsdp, fsdp=fsdp, tp=tp, pp=pp, cp=cp, ep=ep)


def _variants(
    plan: ParallelPlan, workload: TrainingWorkload, software: Software
) -> Iterator[ParallelPlan]:
    depth = [1, 2, 4] if plan.pp > 1 else [1]
    for vp in depth:
        if vp > 1 and workload.model.layers % (plan.pp * vp):
            continue
        for size in _powers_of_two(_MAX_MICRO_BATCH):
            for recompute in _RECOMPUTE:
                degrees = {name: getattr(plan, name) for name in ("dp", "fsdp", "tp", "pp")}
                degrees |= {"cp": plan.cp, "ep": plan.ep, "vp": vp, "micro_batch_size": size}
                variant = ParallelPlan(**degrees, recompute=recompute, software=software)
                if not variant.violation(workload):
                    yield variant


def search(
    workload: TrainingWorkload,
    cluster: Cluster,
    fitted: FittedModel,
    software: Software | None = None,
    is_calibrated: bool = False,
) -> SearchResult:
    """Return the plans that fit into memory, best first."""
    limit = USABLE * cluster.accelerator.memory_gib * GIB
    fitting, rejected = (
        list[tuple[ParallelPlan, MemoryUse]](),
        list[tuple[ParallelPlan, MemoryUse]](),
    )
    for plan in enumerate_plans(workload, cluster, software or Software()):
        memory = predict_memory(workload, plan)
        (fitting if memory.total <= limit else rejected).append((plan, memory))
    nearest = min(rejected, key=lambda pair: pair[1].total, default=None)
    if not fitting:
        raise _nothing_fits(workload, cluster, nearest, limit)
    times = _predict_all(workload, [plan for plan, _ in fitting], cluster, fitted)
    interval = fitted.interval(is_moe=workload.model.experts > 0, is_calibrated=is_calibrated)
    estimates = [
        PlanEstimate(
            plan=plan,
            workload=workload,
            time=time,
            memory=memory,
            peak_flops=cluster.accelerator.bf16_tflops * 1e12,
            interval=interval,
        )
        for (plan, memory), time in zip(fitting, times, strict=True)
    ]
    simplest = min(
        (pair for pair in rejected if pair[0].recompute == "none"),
        key=lambda pair: (pair[0].tp * pair[0].pp, pair[0].micro_batch_size, pair[1].total),
        default=None,
    )
    return SearchResult(
        estimates=tuple(rank(estimates)),
        considered=len(fitting) + len(rejected),
        too_large=len(rejected),
        nearest=nearest,
        simplest=simplest,
    )


def _predict_all(
    workload: TrainingWorkload, plans: list[ParallelPlan], cluster: Cluster, fitted: FittedModel
) -> list[StepTime]:
    work = stack([count_work(workload, plan, cluster) for plan in plans])
    time = step_time(work, fitted.constants)
    columns = np.stack([np.broadcast_to(getattr(time, name), len(plans)) for name in PARTS], axis=1)
    return [StepTime(**dict(zip(PARTS, row, strict=True))) for row in columns.tolist()]


def rank(estimates: list[PlanEstimate]) -> list[PlanEstimate]:
    """Keep the best plan for each combination of degrees, and order them by predicted time.

    The first is the one with the smallest tp x pp among those within 5 % of the fastest.
    """
    best: dict[tuple[int, ...], PlanEstimate] = {}
    for one in sorted(estimates, key=lambda one: one.step_s):
        plan = one.plan
        best.setdefault((plan.dp, plan.fsdp, plan.tp, plan.pp, plan.cp, plan.ep), one)
    ordered = list(best.values())
    near = [one for one in ordered if one.step_s <= ordered[0].step_s / (1 - TIE)]
    first = min(near, key=lambda one: (one.plan.tp * one.plan.pp, one.step_s))
    return [first, *(one for one in ordered if one is not first)]


def _nothing_fits(
    workload: TrainingWorkload,
    cluster: Cluster,
    nearest: tuple[ParallelPlan, MemoryUse] | None,
    limit: float,
) -> ConfigError:
    if nearest is None:
        return ConfigError(
            f"no plan divides {cluster.gpus} GPUs and a global batch of "
            f"{workload.global_batch_size}",
            hint="choose a global batch size that is a multiple of the number of GPUs",
        )
    plan, memory = nearest
    return ConfigError(
        f"no plan fits into {limit / GIB:.0f} GiB of each of {cluster.gpus} GPUs; the smallest "
        f"({plan.describe()}) needs {memory.total / GIB:.0f} GiB",
        hint="use more GPUs, GPUs with more memory, or a shorter sequence",
    )
