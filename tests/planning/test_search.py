from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.core.errors import ConfigError
from ingot.planning.fit import load_fitted
from ingot.planning.hardware import ACCELERATORS, Cluster
from ingot.planning.memory import GIB
from ingot.planning.plan import Software
from ingot.planning.search import USABLE, PlanEstimate, enumerate_plans, rank, search
from ingot.planning.workload import SHAPES, TrainingWorkload

FITTED = load_fitted()


def work(name: str = "llama3-8b", batch: int = 128, seq_len: int = 8192) -> TrainingWorkload:
    return TrainingWorkload(model=SHAPES[name], seq_len=seq_len, global_batch_size=batch)


def cluster(gpus: int, gpu: str = "h100", **options: int) -> Cluster:
    return Cluster(accelerator=ACCELERATORS[gpu], gpus=gpus, **options)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([1, 2, 6, 8, 12, 16, 24]),
    st.sampled_from(["llama3-8b", "mixtral-8x7b"]),
    st.sampled_from([24, 64]),
)
def test_every_plan_uses_all_gpus_once_and_can_run(gpus: int, name: str, batch: int) -> None:
    found = list(enumerate_plans(work(name, batch, 2048), cluster(gpus), Software()))
    assert len(set(found)) == len(found)
    for plan in found:
        assert plan.dp * plan.fsdp * plan.tp * plan.pp * plan.cp == gpus
        assert not plan.violation(work(name, batch, 2048))


def test_plans_fit_into_memory() -> None:
    found = search(work(), cluster(16), FITTED)
    limit = USABLE * ACCELERATORS["h100"].memory_gib * GIB
    assert all(one.memory.total <= limit for one in found.estimates)
    assert found.too_large > 0
    assert found.nearest
    assert found.nearest[1].total > limit
    assert found.simplest
    assert found.simplest[0].recompute == "none"


def test_the_first_plan_is_the_simplest_of_those_that_are_as_fast() -> None:
    found = search(work(), cluster(16), FITTED).estimates
    fastest = min(one.step_s for one in found)
    near = [one for one in found if one.step_s <= fastest / 0.95]
    assert found[0] in near
    assert found[0].plan.tp * found[0].plan.pp == min(o.plan.tp * o.plan.pp for o in near)
    rest = [one.step_s for one in found[1:]]
    assert rest == sorted(rest)


def test_each_layout_is_listed_once() -> None:
    found = search(work(), cluster(16), FITTED).estimates
    layouts = [(o.plan.dp, o.plan.fsdp, o.plan.tp, o.plan.pp, o.plan.cp) for o in found]
    assert len(set(layouts)) == len(layouts)


def test_a_small_model_needs_no_model_parallelism() -> None:
    plan = search(work(), cluster(64), FITTED).estimates[0].plan
    assert (plan.tp, plan.pp, plan.cp) == (1, 1, 1)


def test_a_large_model_on_small_memory_is_sharded() -> None:
    first = search(work("llama3-70b", 64), cluster(64), FITTED).estimates[0]
    assert first.plan.fsdp * first.plan.tp * first.plan.pp >= 16
    assert first.memory.states < 40 * GIB


def test_experts_are_spread() -> None:
    first = search(work("qwen3-30b-a3b", 64, 4096), cluster(8), FITTED).estimates[0]
    assert first.plan.ep > 1 or first.plan.fsdp > 1


def test_long_sequences_use_context_parallelism() -> None:
    found = search(work("llama3-8b", 8, 131072), cluster(64), FITTED).estimates
    assert found[0].plan.cp > 1


def test_what_is_derived_from_the_step_time() -> None:
    one = search(work(), cluster(8), FITTED).estimates[0]
    assert one.tokens_per_gpu_s * one.step_s * 8 == pytest.approx(128 * 8192)
    assert one.low < one.step_s < one.high
    assert 0.2 < one.mfu < 0.7
    assert one.gpu_hours(one.tokens_per_gpu_s * 3600) == pytest.approx(1)


def test_nothing_fits_says_what_is_missing() -> None:
    with pytest.raises(ConfigError, match=r"no plan fits into 74 GiB .* needs \d+ GiB"):
        search(work("llama3-405b", 8), cluster(8), FITTED)


def test_a_batch_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no plan divides 37 GPUs"):
        search(work(batch=1, seq_len=2000), cluster(37, per_node=37), FITTED)


def test_ties_are_broken_by_less_model_parallelism() -> None:
    some = search(work(), cluster(8), FITTED).estimates
    plain = next(one for one in some if one.plan.tp * one.plan.pp == 1)
    split = next(one for one in some if one.plan.tp * one.plan.pp == 2)

    def timed(one: PlanEstimate, seconds: float) -> PlanEstimate:
        nothing = dict.fromkeys(vars(one.time), 0.0)
        return replace(one, time=replace(one.time, **{**nothing, "matmul": seconds}))

    assert rank([timed(plain, 1.03), timed(split, 1.0)])[0].plan == plain.plan
    assert rank([timed(plain, 1.10), timed(split, 1.0)])[0].plan == split.plan
