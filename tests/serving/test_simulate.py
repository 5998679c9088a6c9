from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError
from ingot.serving.engine.scheduler import SchedulerConfig
from ingot.serving.simulate import (
    SLO,
    CostModel,
    RequestWorkload,
    SimulationReport,
    _bucket,
    _bucket_percentiles,
    simulate,
)

FREE = CostModel(
    weight_bytes=0, flops_per_token=0, kv_bytes_per_token=0, attention_flops=0, overhead_s=1.0
)  # every step takes a second


def run(
    config: SchedulerConfig | None = None, costs: CostModel | None = None, **workload: Any
) -> SimulationReport:
    return simulate(
        config or SchedulerConfig(num_blocks=512),
        costs or CostModel(),
        RequestWorkload(**workload),
        SLO(),
    )


def test_one_request_takes_as_long_as_its_steps() -> None:
    """100 tokens of prompt in chunks of 64: two steps, and one more for each other token."""
    config = SchedulerConfig(
        num_blocks=512, max_num_batched_tokens=16, max_num_seqs=16
    )  # bursts of 64
    report = run(
        config,
        FREE,
        num_requests=1,
        input_len=100,
        output_len=10,
        length_sigma=0,
        shared_prefix_ratio=0,
    )
    assert report.steps == report.decisions == 11
    assert report.output_tokens == 10
    assert report.tokens_per_step == pytest.approx(109 / 11, abs=0.01)
    assert report.itl == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert report.ttft["p50"] == pytest.approx(2, rel=0.01)
    assert report.e2e["p50"] == pytest.approx(11, rel=0.01)


def test_a_step_takes_reading_and_arithmetic() -> None:
    costs = CostModel(
        weight_bytes=100,
        flops_per_token=10,
        kv_bytes_per_token=3,
        attention_flops=7,
        bandwidth=100,
        peak_flops=1000,
        overhead_s=0.125,
    )
    assert costs.step_seconds(0, 0, 0) == 1.125
    assert costs.step_seconds(300, 0, 0) == pytest.approx(1.125 + 3)
    assert costs.step_seconds(0, 50, 0) == pytest.approx(1.125 + 1.5)
    assert costs.step_seconds(0, 0, 1000) == pytest.approx(1.125 + 7)


@pytest.mark.parametrize(
    ("costs", "seconds"),
    [
        # Each step reads its whole context; pairs are half of the square of the prompt.
        ({"kv_bytes_per_token": 1.0}, 64 + 100 + sum(range(101, 110))),
        ({"attention_flops": 1.0}, 100 * 100 / 2),
        ({"flops_per_token": 1.0}, 109),
        ({"weight_bytes": 1.0}, 11),
    ],
)
def test_a_request_costs_what_it_reads_and_computes(
    costs: dict[str, float], seconds: float
) -> None:
    only = {
        "weight_bytes": 0.0,
        "flops_per_token": 0.0,
        "kv_bytes_per_token": 0.0,
        "attention_flops": 0.0,
        "overhead_s": 0.0,
        **costs,
    }
    model = CostModel(bandwidth=1.0, peak_flops=1.0, **only)
    config = SchedulerConfig(
        num_blocks=512, max_num_batched_tokens=16, max_num_seqs=16
    )  # bursts of 64
    report = run(
        config,
        model,
        num_requests=1,
        input_len=100,
        output_len=10,
        length_sigma=0,
        shared_prefix_ratio=0,
    )
    assert report.e2e["p50"] == pytest.approx(seconds, rel=0.006)


def test_a_shared_prefix_is_computed_once() -> None:
    """Every request has 256 tokens of the same and 32 of its own, and all but the first find the
    prefix: 256 of 288 + 1 tokens, the last sampled one not being computed."""
    report = run(
        num_requests=200,
        request_rate=1,
        shared_prefix_ratio=1,
        num_prefixes=1,
        input_len=32,
        output_len=2,
        length_sigma=0,
    )
    assert report.hit_rate == pytest.approx(199 * 256 / (200 * 289), abs=1e-4)
    alone = run(
        num_requests=200,
        request_rate=1,
        shared_prefix_ratio=0,
        input_len=288,
        output_len=2,
        length_sigma=0,
    )
    assert alone.hit_rate == 0
    assert report.ttft["p50"] < alone.ttft["p50"] / 3


def test_too_few_blocks_lead_to_preemption_and_everything_is_answered() -> None:
    report = run(
        SchedulerConfig(num_blocks=64),
        num_requests=100,
        request_rate=100,
        input_len=100,
        output_len=200,
        max_len=1000,
    )
    assert report.preemptions > 0
    assert report.finish_reasons == {"length": 100}
    roomy = run(
        SchedulerConfig(num_blocks=4096),
        num_requests=100,
        request_rate=100,
        input_len=100,
        output_len=200,
        max_len=1000,
    )
    assert roomy.preemptions == 0
    assert roomy.output_tokens == report.output_tokens
    assert roomy.duration_s < report.duration_s


def test_every_request_ends_once_whatever_happens() -> None:
    config = SchedulerConfig(num_blocks=256, max_queue=50)
    report = run(
        config, num_requests=1000, request_rate=40, cancel_ratio=0.3, deadline=3.0, burst_size=20
    )
    assert sum(report.finish_reasons.values()) == 1000
    assert set(report.finish_reasons) == {"length", "cancelled", "deadline", "rejected"}


def test_goodput_counts_only_what_keeps_the_goal() -> None:
    def goodput(first: float, between: float) -> float:
        slo, workload = (
            SLO(ttft=first, tpot=between),
            RequestWorkload(num_requests=300, request_rate=30),
        )
        return simulate(SchedulerConfig(num_blocks=512), CostModel(), workload, slo).goodput_per_s

    assert goodput(1e9, 1e9) == run(num_requests=300, request_rate=30).requests_per_s
    assert 0 < goodput(0.2, 1e9) < goodput(1e9, 1e9)
    assert 0 < goodput(1e9, 0.03) < goodput(1e9, 1e9)


def test_the_same_seed_is_the_same_run() -> None:
    def results(seed: int) -> dict[str, Any]:
        measured = ("decisions_per_s", "steps_per_s", "wall_seconds")
        report = dataclasses.asdict(run(num_requests=200, seed=seed))
        return {name: value for name, value in report.items() if name not in measured}

    assert results(1) == results(1) != results(2)


def test_a_trace_is_what_it_is_asked_to_be() -> None:
    workload = RequestWorkload(
        num_requests=20_000,
        request_rate=5,
        burst_size=10,
        input_len=100,
        output_len=50,
        shared_prefix_ratio=0.25,
        prefix_len=7,
    )
    drawn = list(workload.generate())
    times = [arrival for arrival, _, _ in drawn]
    assert times == sorted(times)
    assert set(Counter(times).values()) == {10}
    assert times[-1] == pytest.approx(20_000 / 5, rel=0.1)
    prompts = [len(request.prompt) for _, request, _ in drawn]
    assert sum(prompts) / 20_000 == pytest.approx(100 + 0.25 * 7, rel=0.05)
    assert sum(r.max_tokens for _, r, _ in drawn) / 20_000 == pytest.approx(50, rel=0.05)
    assert len({request.prompt for _, request, _ in drawn}) == 20_000


def test_progress_hears_of_every_request() -> None:
    heard: list[int] = []
    simulate(
        SchedulerConfig(num_blocks=512),
        CostModel(),
        RequestWorkload(num_requests=2500, output_len=2),
        SLO(),
        heard.append,
    )
    assert sum(heard) == 2500
    assert len(heard) == 3


@given(st.lists(st.floats(1e-6, 1e3), min_size=1), st.sampled_from([50, 90, 99]))
def test_percentiles_are_within_a_percent(values: list[float], percentile: int) -> None:
    exact = sorted(values)[math.ceil(len(values) * percentile / 100) - 1]
    found = _bucket_percentiles(map(_bucket, values))[f"p{percentile}"]
    assert found == pytest.approx(exact, rel=0.006, abs=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_requests": 0},
        {"request_rate": 0.0},
        {"request_rate": math.nan},
        {"shared_prefix_ratio": 1.5},
        {"deadline": -1.0},
        {"prefix_len": 10**5, "num_prefixes": 10**5},
    ],
)
def test_a_trace_is_bounded(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RequestWorkload(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"bandwidth": 0.0}, {"peak_flops": math.nan}, {"overhead_s": -1.0}]
)
def test_costs_are_bounded(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CostModel(**wrong)
