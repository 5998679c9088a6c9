from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from ingot.planning.memory import GIB, MEMORY_PARTS, predict_memory
from ingot.planning.plan import ParallelPlan, Software
from ingot.planning.workload import SHAPES, ModelShape, TrainingWorkload
from tests.planning.strategies import plans, workloads

WORK = TrainingWorkload(model=SHAPES["llama3-8b"], seq_len=8192, global_batch_size=128)


@given(plans, workloads)
def test_parts_add_up_and_none_is_negative(plan: ParallelPlan, work: TrainingWorkload) -> None:
    memory = predict_memory(work, plan)
    assert all(getattr(memory, name) >= 0 for name in MEMORY_PARTS)
    assert memory.total == pytest.approx(sum(getattr(memory, name) for name in MEMORY_PARTS))


@given(plans, workloads)
def test_more_shards_never_need_more_memory(plan: ParallelPlan, work: TrainingWorkload) -> None:
    plan = replace(plan, fsdp=2, dp=1)
    sizes = [predict_memory(work, replace(plan, fsdp=n)).states for n in (2, 4, 8, 16, 64)]
    assert sizes == sorted(sizes, reverse=True)


@given(plans, workloads)
def test_recomputation_never_keeps_more(plan: ParallelPlan, work: TrainingWorkload) -> None:
    plan = replace(plan, micro_batch_size=2)
    sizes = {
        how: predict_memory(work, replace(plan, recompute=how)).activations
        for how in ("none", "attention")
    }
    assert sizes["attention"] <= sizes["none"]


def test_full_recomputation_keeps_the_inputs_of_blocks_and_one_block() -> None:
    none, selective, full = (
        predict_memory(WORK, ParallelPlan(fsdp=8, recompute=how)).activations
        for how in ("none", "selective", "full")
    )
    inputs = 32 * 2 * 4096 * 8192
    assert full == pytest.approx(inputs + none / 32)
    assert full < selective < none


def test_tensor_parallelism_divides_weights_and_activations() -> None:
    one, eight = (predict_memory(WORK, ParallelPlan(tp=tp)) for tp in (1, 8))
    assert eight.weights == pytest.approx(one.weights / 8)
    regather = ParallelPlan(tp=8, software=Software(regather=True))
    assert predict_memory(WORK, regather).activations == pytest.approx(one.activations / 8)
    assert eight.activations > one.activations / 8
    no_sp = ParallelPlan(tp=8, software=Software(sequence_parallel=False))
    assert predict_memory(WORK, no_sp).activations > eight.activations


def test_a_pipeline_holds_several_micro_batches() -> None:
    """Each of 4 stages has a quarter of the layers, the first holds 4 micro-batches."""
    alone, staged = (predict_memory(WORK, ParallelPlan(pp=pp)) for pp in (1, 4))
    assert staged.activations == pytest.approx(alone.activations)
    interleaved = predict_memory(WORK, ParallelPlan(pp=4, vp=2))
    assert interleaved.activations == pytest.approx(alone.activations * (1 + 3 / 8))


def test_few_micro_batches_hold_less() -> None:
    one = replace(WORK, global_batch_size=1)
    assert (
        predict_memory(one, ParallelPlan(pp=4)).total
        < predict_memory(WORK, ParallelPlan(pp=4)).total
    )


def test_experts_are_divided_by_ep() -> None:
    work = TrainingWorkload(model=SHAPES["mixtral-8x7b"], seq_len=4096, global_batch_size=64)
    one, eight = (predict_memory(work, ParallelPlan(dp=8, ep=ep)) for ep in (1, 8))
    saved = 18 * work.model.expert_weights * 7 / 8
    assert one.states - eight.states == pytest.approx(saved)


def test_the_figures_of_the_paper_on_recomputation() -> None:
    """22B, TP 8: 59.3 GiB of activations without recomputation, 9.6 with the selective one."""
    model = ModelShape(
        layers=48,
        dim=6144,
        heads=64,
        kv_heads=64,
        head_dim=96,
        ffn_dim=24576,
        gated=False,
        vocab_size=51200,
        tied=True,
    )
    work = TrainingWorkload(model=model, seq_len=2048, global_batch_size=4)
    old = Software(attention="unfused", sequence_parallel=False)
    plan = ParallelPlan(tp=8, micro_batch_size=4, software=old)
    assert predict_memory(work, plan).activations / GIB == pytest.approx(59.3, rel=0.02)
    new = replace(
        plan, recompute="attention", software=Software(attention="unfused", regather=True)
    )
    assert predict_memory(work, new).activations / GIB == pytest.approx(9.6, rel=0.02)
    assert predict_memory(work, plan).states / GIB == pytest.approx(45.6, rel=0.02)


@pytest.mark.parametrize("ep", [1, 4, 32])
def test_all_gpus_together_hold_at_least_the_model(ep: int) -> None:
    """The states of DeepSeek-V3 take 16 bytes per weight, however they are spread."""
    model = SHAPES["deepseek-v3"]
    work = TrainingWorkload(model=model, seq_len=4096, global_batch_size=256)
    memory = predict_memory(work, ParallelPlan(fsdp=256, ep=ep))
    assert memory.optimizer * 256 == pytest.approx(8 * model.params)


def test_zero_1_shards_the_optimizer_only() -> None:
    plain, sharded = (
        predict_memory(WORK, ParallelPlan(dp=8, software=Software(zero=zero))) for zero in (0, 1)
    )
    assert sharded.optimizer == pytest.approx(plain.optimizer / 8)
    assert (sharded.weights, sharded.gradients) == (plain.weights, plain.gradients)


def test_a_pipeline_stage_keeps_its_weights_gathered() -> None:
    alone, staged = (predict_memory(WORK, ParallelPlan(fsdp=8, pp=pp)) for pp in (1, 4))
    assert staged.gradients > alone.gradients
    assert staged.optimizer < alone.optimizer
