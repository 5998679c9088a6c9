from __future__ import annotations

from dataclasses import replace

import pytest

from ingot.planning.plan import ParallelPlan, Software
from ingot.planning.workload import SHAPES, TrainingWorkload

WORK = TrainingWorkload(model=SHAPES["llama3-8b"], seq_len=8192, global_batch_size=64)
MOE = TrainingWorkload(model=SHAPES["mixtral-8x7b"], seq_len=4096, global_batch_size=64)


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (ParallelPlan(tp=3), "tp 3 does not divide 32 heads"),
        (ParallelPlan(pp=64), "64 pipeline stages for 32 layers"),
        (ParallelPlan(pp=16, vp=4), "64 pipeline stages for 32 layers"),
        (ParallelPlan(cp=3), "2 x cp 3 does not divide the sequence length 8192"),
        (ParallelPlan(ep=2), "ep 2 does not divide 0 experts"),
        (ParallelPlan(dp=3), "3 data ranks x micro-batch 1 does not divide the global batch of 64"),
        (ParallelPlan(dp=64, micro_batch_size=2), "does not divide the global batch"),
    ],
)
def test_a_layout_that_cannot_run_says_why(plan: ParallelPlan, reason: str) -> None:
    assert reason in plan.violation(WORK)


def test_experts_are_spread_over_the_gpus_of_a_stage() -> None:
    assert ParallelPlan(dp=2, ep=4).violation(MOE) == "ep 4 does not divide 2 GPUs of a stage"
    assert not ParallelPlan(dp=4, ep=4).violation(MOE)
    assert not ParallelPlan(dp=2, tp=2, ep=4).violation(MOE)


def test_more_tp_than_key_value_heads_is_allowed_if_they_divide() -> None:
    assert not ParallelPlan(tp=16).violation(WORK)


def test_weights_are_sharded_over_fsdp_and_cp() -> None:
    assert ParallelPlan(dp=4, fsdp=8, cp=2).shards == 16
    assert ParallelPlan(dp=4, cp=2).shards == 1
    assert replace(ParallelPlan(cp=8), software=Software(zero=3)).shards == 8


def test_zero_1_shards_states_over_all_data_ranks() -> None:
    plan = ParallelPlan(dp=4, cp=2, software=Software(zero=1))
    assert (plan.shards, plan.state_shards) == (1, 8)


def test_micro_batches_of_a_step() -> None:
    assert ParallelPlan(dp=4, fsdp=2, micro_batch_size=4).micro_batches(WORK) == 2


def test_fsdp_shards_experts_over_the_gpus_that_hold_the_same() -> None:
    plan = ParallelPlan(fsdp=64, ep=16)
    assert (plan.shards, plan.expert_split, plan.expert_shards) == (64, 16, 4)
    assert ParallelPlan(fsdp=64, tp=2, ep=16).expert_shards == 8
    assert ParallelPlan(fsdp=8, ep=8).expert_shards == 1
    assert ParallelPlan(dp=8, ep=4).expert_state_shards == 1
    assert ParallelPlan(dp=8, ep=4, software=Software(zero=1)).expert_state_shards == 2
    assert ParallelPlan(fsdp=8, tp=2).expert_shards == 8


@pytest.mark.parametrize("ep", [1, 2, 8, 64])
def test_no_layout_holds_less_than_one_copy_of_the_experts(ep: int) -> None:
    plan = ParallelPlan(fsdp=32, tp=2, ep=ep)
    assert plan.gpus == plan.expert_split * plan.expert_shards
