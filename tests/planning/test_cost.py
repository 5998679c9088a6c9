from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import example, given

from ingot.planning.cost import (
    PARTS,
    Constants,
    Work,
    count_work,
    predict,
    stack,
    step_time,
)
from ingot.planning.hardware import ACCELERATORS, Cluster
from ingot.planning.plan import ParallelPlan, Software
from ingot.planning.workload import SHAPES, TrainingWorkload
from tests.planning.strategies import cluster_for, plans, workloads

C = Constants()
WORK = TrainingWorkload(model=SHAPES["llama3-8b"], seq_len=8192, global_batch_size=128)
H100 = ACCELERATORS["h100"]


def seconds(plan: ParallelPlan, work: TrainingWorkload = WORK, gpu: str = "h100") -> float:
    return float(predict(work, plan, cluster_for(plan, gpu), C).total)


@given(plans, workloads)
def test_every_part_is_finite_and_not_negative(plan: ParallelPlan, work: TrainingWorkload) -> None:
    time = predict(work, plan, cluster_for(plan), C)
    assert all(np.isfinite(getattr(time, name)) and getattr(time, name) >= 0 for name in PARTS)
    assert time.total == pytest.approx(sum(getattr(time, name) for name in PARTS))
    assert 0 <= time.communication < time.total


@given(plans, workloads)
def test_more_micro_batches_take_longer(plan: ParallelPlan, work: TrainingWorkload) -> None:
    double = replace(work, global_batch_size=2 * work.global_batch_size)
    assert seconds(plan, work) < seconds(plan, double) <= 2 * seconds(plan, work) * (1 + 1e-9)


@given(plans, workloads)
def test_longer_sequences_cost_more_per_token(plan: ParallelPlan, work: TrainingWorkload) -> None:
    double = replace(work, seq_len=2 * work.seq_len)
    assert seconds(plan, double) > seconds(plan, work)


# Attention once hid the communication of cp and of fsdp at the same time.
@example(
    ParallelPlan(
        fsdp=2, tp=8, cp=2, recompute="attention", software=Software(sequence_parallel=False)
    ),
    TrainingWorkload(model=SHAPES["gpt3-175b"], seq_len=2048, global_batch_size=1024),
)
@given(plans, workloads)
def test_recomputation_is_never_faster(plan: ParallelPlan, work: TrainingWorkload) -> None:
    least, most = (seconds(replace(plan, recompute=how), work) for how in ("none", "full"))
    assert least <= seconds(plan, work) <= most


@given(plans, workloads)
def test_eager_and_exposed_communication_are_never_faster(
    plan: ParallelPlan, work: TrainingWorkload
) -> None:
    for name, slow in (("eager", True), ("tp_overlap", False), ("dp_overlap", False)):
        variants = [
            replace(plan, software=replace(plan.software, **{name: value}))
            for value in (slow, not slow)
        ]
        assert seconds(variants[0], work) >= seconds(variants[1], work)


@given(plans, workloads)
def test_no_plan_exceeds_the_peak(plan: ParallelPlan, work: TrainingWorkload) -> None:
    peak = (H100.fp8_tflops if work.precision == "fp8" else H100.bf16_tflops) or 0
    assert work.flops_per_step / seconds(plan, work) / plan.gpus < peak * 1e12


def test_stacked_work_gives_the_times_of_single_plans() -> None:
    some = [ParallelPlan(fsdp=8), ParallelPlan(dp=4, tp=2), ParallelPlan(dp=2, pp=4, vp=2)]
    works = [count_work(WORK, plan, cluster_for(plan)) for plan in some]
    together = step_time(stack(works), C)
    for at, plan in enumerate(some):
        single = predict(WORK, plan, cluster_for(plan), C)
        for name in PARTS:
            values = np.broadcast_to(getattr(together, name), len(some))
            assert values[at] == pytest.approx(getattr(single, name))


def test_the_bubble_is_that_of_1f1b_and_shrinks_with_virtual_stages() -> None:
    plan = ParallelPlan(dp=2, pp=4)
    time = predict(WORK, plan, cluster_for(plan), C)
    busy = time.total / (1 + C.scale * 0) - time.bubble - time.imbalance - time.gradients
    busy -= time.optimizer
    assert time.bubble / busy == pytest.approx(3 / 64)
    interleaved = predict(WORK, replace(plan, vp=4), cluster_for(plan), C)
    assert interleaved.bubble == pytest.approx(time.bubble / 4)


def test_uneven_stages_wait_for_the_largest() -> None:
    plan, model = ParallelPlan(pp=4), replace(SHAPES["llama3-8b"], vocab_size=64)
    waits = [
        predict(replace(WORK, model=replace(model, layers=n)), plan, cluster_for(plan), C).imbalance
        for n in (32, 33, 35)
    ]
    assert waits[0] < 0.01 * waits[1]
    assert waits[2] < 0.5 * waits[1]


@pytest.mark.parametrize(
    ("plan", "part"),
    [
        (ParallelPlan(tp=8), "tensor_parallel"),
        (ParallelPlan(cp=8), "context_parallel"),
        (ParallelPlan(fsdp=8), "fsdp"),
        (ParallelPlan(dp=8, software=Software(dp_overlap=False)), "gradients"),
        (ParallelPlan(pp=8), "bubble"),
    ],
)
def test_each_axis_has_its_own_cost(plan: ParallelPlan, part: str) -> None:
    time = predict(WORK, plan, cluster_for(plan), C)
    parts = ("tensor_parallel", "context_parallel", "fsdp", "gradients", "bubble")
    assert [name for name in parts if getattr(time, name) > 0] == [part]


def test_fsdp_over_a_slow_network_is_exposed() -> None:
    plan = ParallelPlan(fsdp=64)
    slow = Cluster(accelerator=H100, gpus=64, nic_gb_s=0.1)
    fast = Cluster(accelerator=H100, gpus=64)
    at_rate = predict(WORK, plan, fast, C)
    assert predict(WORK, plan, slow, C).fsdp > 10 * at_rate.fsdp


def test_experts_wait_for_launches_unless_graphs_are_replayed() -> None:
    work = TrainingWorkload(model=SHAPES["qwen3-30b-a3b"], seq_len=4096, global_batch_size=64)
    plan = ParallelPlan(dp=8, ep=8)
    time = predict(work, plan, cluster_for(plan), C)
    graphs = replace(plan, software=Software(graphs=True))
    assert predict(work, graphs, cluster_for(plan), C).launch < 0.1 * time.launch
    assert time.expert_parallel > 0


def test_low_precision_is_faster_but_less_than_twice() -> None:
    plan = ParallelPlan(fsdp=8)
    assert 1.1 < seconds(plan) / seconds(plan, replace(WORK, precision="fp8")) < 2


def test_every_field_of_work_is_used() -> None:
    """A fault planted in any field changes the step time of some plan."""
    moe = TrainingWorkload(model=SHAPES["deepseek-v3"], seq_len=4096, global_batch_size=256)
    some = [
        (moe, ParallelPlan(dp=8, tp=2, pp=4, vp=2, cp=2, ep=16), "h100"),
        (WORK, ParallelPlan(fsdp=16, software=Software(eager=True)), "h100"),
        (replace(WORK, precision="fp8"), ParallelPlan(dp=8, tp=2, cp=2), "h100"),
        (replace(WORK, precision="fp4"), ParallelPlan(fsdp=16), "b200"),
        (WORK, ParallelPlan(dp=2, software=Software(dp_overlap=False)), "h100"),
        (WORK, ParallelPlan(dp=16, software=Software(dp_overlap=False)), "h100"),
        (replace(WORK, model=replace(WORK.model, layers=31)), ParallelPlan(pp=4), "h100"),
        (replace(WORK, model=replace(WORK.model, layers=32)), ParallelPlan(pp=4), "h100"),
        (WORK, ParallelPlan(cp=16), "h100"),
    ]
    works = [count_work(work, plan, cluster_for(plan, gpu)) for work, plan, gpu in some]
    for field in fields(Work):
        changed = [replace(w, **{field.name: 1.5 * getattr(w, field.name) + 1}) for w in works]
        pairs = zip(works, changed, strict=True)
        assert any(step_time(a, C).total != step_time(b, C).total for a, b in pairs), field.name


def test_every_constant_is_used() -> None:
    moe = TrainingWorkload(
        model=SHAPES["deepseek-v3"], seq_len=4096, global_batch_size=256, precision="fp8"
    )
    some = [
        (moe, ParallelPlan(dp=8, tp=2, pp=2, cp=2, ep=16, software=Software(tp_overlap=True))),
        (WORK, ParallelPlan(fsdp=16, software=Software(eager=True))),
        (replace(WORK, precision="fp4"), ParallelPlan(fsdp=16)),
    ]
    for field in fields(Constants):
        other = replace(C, **{field.name: 1.5 * getattr(C, field.name)})
        times = [
            [predict(work, plan, cluster_for(plan), c).total for work, plan in some]
            for c in (C, other)
        ]
        assert times[0] != times[1], field.name
