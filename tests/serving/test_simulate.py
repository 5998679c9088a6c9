from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError
from ingot.serving.costs import CostModel
from ingot.serving.engine.scheduler import SchedulerConfig
from ingot.serving.fleet.router import RouterPolicy
from ingot.serving.machine import MachineConfig, ProcessCosts
from ingot.serving.simulate import (
    SLO,
    FleetConfig,
    SimulationReport,
    _bucket,
    _bucket_percentiles,
    simulate,
)
from ingot.serving.workload import RequestWorkload

FREE = CostModel(
    weight_bytes=0, flops_per_token=0, kv_bytes_per_token=0, attention_flops=0, overhead_s=1.0
)  # every step takes a second


def run(
    config: SchedulerConfig | None = None,
    costs: CostModel | None = None,
    fleet: FleetConfig | None = None,
    machine: MachineConfig | None = None,
    **workload: Any,
) -> SimulationReport:
    return simulate(
        config or SchedulerConfig(num_blocks=512),
        costs or CostModel(),
        RequestWorkload(**workload),
        SLO(),
        fleet=fleet or FleetConfig(),
        machine=machine or MachineConfig(),
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


def test_one_replica_gives_the_results_of_before_there_were_several() -> None:
    """Numbers of the simulator that had one scheduler and no router."""
    report = run(
        SchedulerConfig(num_blocks=256, max_queue=50),
        num_requests=1000,
        request_rate=40,
        cancel_ratio=0.3,
        deadline=3.0,
        burst_size=20,
    )
    assert report.finish_reasons == {
        "cancelled": 151,
        "deadline": 441,
        "length": 106,
        "rejected": 302,
    }
    assert report.duration_s == 30.205
    assert report.ttft == {"p50": 1.477, "p90": 2.034, "p99": 2.2255}
    assert report.itl == {"p50": 0.0314, "p90": 0.1075, "p99": 0.113}
    assert report.e2e == {"p50": 2.56, "p90": 2.9447, "p99": 3.0042}
    assert (report.hit_rate, report.preemptions) == (0.2623, 9)
    assert (report.steps, report.decisions, report.output_tokens) == (461, 11588, 11381)


PREFIXES: dict[str, Any] = {
    "shared_prefix_ratio": 1,
    "num_prefixes": 60,
    "prefix_len": 1024,
    "input_len": 64,
    "output_len": 16,
}


def test_the_prefix_policy_finds_what_others_compute_again() -> None:
    """The prefixes fit into the caches of all replicas together, not into each."""

    def serve(policy: RouterPolicy) -> SimulationReport:
        fleet = FleetConfig(replicas=8, policy=policy)
        return run(fleet=fleet, num_requests=800, request_rate=28, **PREFIXES)

    prefix, *others = reports = [serve(policy) for policy in get_args(RouterPolicy)]
    for report in reports:
        assert report.finish_reasons == {"length": 800}
        assert sum(replica.requests for replica in report.replicas) == 800
        assert report.output_tokens == prefix.output_tokens
    for other in others:
        assert prefix.hit_rate > 0.8 > 0.4 > other.hit_rate
        assert prefix.ttft["p50"] <= 0.6 * other.ttft["p50"]
    counts = [replica.requests for replica in others[-1].replicas]
    assert max(counts) - min(counts) <= 1, "round robin"


def test_replicas_share_the_load() -> None:
    """Four replicas serve four times the rate, with the latency of one at most."""
    one = run(num_requests=500, request_rate=8)
    four = run(fleet=FleetConfig(replicas=4), num_requests=2000, request_rate=32)
    assert 0.5 * one.ttft["p50"] < four.ttft["p50"] <= one.ttft["p50"]
    assert four.duration_s == pytest.approx(one.duration_s, rel=0.15)
    busy = [replica.busy_s for replica in four.replicas]
    assert max(busy) < 1.1 * min(busy)


@pytest.mark.parametrize("replicas", [1, 3])
def test_requests_of_a_replica_that_fails_are_retried_or_continued(replicas: int) -> None:
    """All tokens arrive, none twice; on a fleet of one, after the restart."""

    def serve(fleet: FleetConfig) -> SimulationReport:
        rate = 10 * replicas
        return run(fleet=fleet, num_requests=400, request_rate=rate, burst_size=10)

    whole = serve(FleetConfig(replicas=replicas))
    broken = serve(FleetConfig(replicas=replicas, fail_at=4.0, restart_s=5.0))
    assert whole.failover is None
    failover = broken.failover
    assert failover
    assert failover.continued > 0
    assert broken.finish_reasons == whole.finish_reasons == {"length": 400}
    assert broken.output_tokens == whole.output_tokens
    assert broken.e2e["p99"] > whole.e2e["p99"]
    if replicas == 1:
        assert failover.pause["p50"] > 5
    else:
        assert failover.pause["p99"] < 5
        assert min(r.busy_s for r in broken.replicas) < min(r.busy_s for r in whole.replicas)


def test_a_request_without_a_token_is_retried_and_one_with_tokens_continued() -> None:
    """Steps take a second. Prompts of 100 tokens; one is computed when the replica dies at 2.5 s,
    and has two tokens then; the other one has arrived in the second step and has none."""
    config = SchedulerConfig(num_blocks=512)
    workload: dict[str, Any] = {"num_requests": 2, "input_len": 100}
    workload |= {"output_len": 10, "length_sigma": 0}
    arrivals = [a for a, _, _ in RequestWorkload(request_rate=0.7, seed=5, **workload).generate()]
    first, second = arrivals
    fail_at = first + 2.5
    assert first + 1 < second < fail_at
    fleet = FleetConfig(fail_at=fail_at, restart_s=10.0)
    report = run(config, FREE, fleet, request_rate=0.7, seed=5, shared_prefix_ratio=0.5, **workload)
    failover = report.failover
    assert failover
    assert (failover.continued, failover.retried) == (1, 1)
    # The last token before came at the end of the second step, the next one a step after 12.5 s.
    assert failover.pause["p50"] == pytest.approx(11.5, rel=0.01)
    assert failover.ttft["p50"] == pytest.approx(first + 13.5 - second, rel=0.01)
    assert report.output_tokens == 20


def test_a_failure_after_the_last_request_changes_nothing() -> None:
    late = run(fleet=FleetConfig(fail_at=1e6), num_requests=50)
    assert late.duration_s == run(num_requests=50).duration_s
    assert late.failover
    assert late.failover.continued == late.failover.retried == 0


@pytest.mark.parametrize("wrong", [{"replicas": 0}, {"fail_at": -1.0}, {"restart_s": math.nan}])
def test_a_fleet_is_bounded(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FleetConfig(**wrong)


# Replicas on one machine


def test_processes_that_take_no_time_change_nothing() -> None:
    """Nor do cores that are never short."""
    alone = run(fleet=FleetConfig(replicas=3), num_requests=200, burst_size=5)
    shared = run(
        fleet=FleetConfig(replicas=3),
        machine=MachineConfig(cores=3),
        num_requests=200,
        burst_size=5,
    )
    assert shared.duration_s == pytest.approx(alone.duration_s, rel=1e-6)
    assert (shared.ttft, shared.itl, shared.e2e) == (alone.ttft, alone.itl, alone.e2e)
    assert (shared.steps, shared.decisions) == (alone.steps, alone.decisions)


def test_replicas_of_one_machine_share_its_cores() -> None:
    """Two cores do the work of four replicas in the time that it takes two of them."""
    load: dict[str, Any] = {"num_requests": 600, "request_rate": 1e6, "shared_prefix_ratio": 0}
    load["length_sigma"] = 0
    fleet, machine = FleetConfig(replicas=4, policy="round-robin"), MachineConfig(cores=2)
    shared = run(fleet=fleet, machine=machine, **load)
    alone = run(fleet=fleet, **load)
    assert shared.output_tokens == alone.output_tokens
    work = sum(replica.busy_s for replica in alone.replicas)
    assert shared.duration_s == pytest.approx(work / 2, rel=0.03)
    assert shared.duration_s > 1.5 * alone.duration_s


@pytest.mark.parametrize("cores", [None, 8])
def test_a_request_passes_all_processes(cores: int | None) -> None:
    """Steps take a second; the request 2 + 3, each output 0.3 + 0.2 with its only token, and to
    wake up takes 0.2 and 0.05."""
    machine = MachineConfig(
        cores=cores,
        clients=ProcessCosts(request_s=1.0, prompt_token_s=0.01, wakeup_s=0.05, token_s=0.2),
        server=ProcessCosts(request_s=1.0, prompt_token_s=0.02, wakeup_s=0.2, token_s=0.3),
    )
    only: dict[str, Any] = {"num_requests": 1, "input_len": 100, "output_len": 10}
    only |= {"length_sigma": 0, "shared_prefix_ratio": 0}
    report = run(SchedulerConfig(num_blocks=512), FREE, machine=machine, **only)
    assert report.ttft["p50"] == pytest.approx(2.05 + 3.2 + 1 + 0.75, rel=0.006)
    assert report.itl["p50"] == pytest.approx(1.0, rel=0.006)
    assert report.e2e["p50"] == pytest.approx(2.05 + 3.2 + 10 + 0.75, rel=0.006)


def test_a_server_process_that_is_busy_limits_the_replicas() -> None:
    """With 10 ms for a request, it handles 100 per second however many replicas there are."""
    machine = MachineConfig(server=ProcessCosts(request_s=0.01))
    load: dict[str, Any] = {"num_requests": 500, "request_rate": 1e6, "output_len": 2}
    for replicas in (16, 32):
        report = run(fleet=FleetConfig(replicas=replicas), machine=machine, **load)
        assert report.requests_per_s == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("cores", [None, 2])
def test_a_failure_with_outputs_on_their_way(cores: int | None) -> None:
    """All tokens arrive, none twice, whatever waits in the HTTP process."""
    costs = ProcessCosts(request_s=2e-3, wakeup_s=1e-3, token_s=1e-3)
    machine = MachineConfig(cores=cores, server=costs, clients=costs)
    load: dict[str, Any] = {"num_requests": 400, "request_rate": 30, "burst_size": 10}
    for fail_at in (1.0, 4.0, 6.0):
        fleet = FleetConfig(replicas=3, fail_at=fail_at, restart_s=5.0)
        report = run(fleet=fleet, machine=machine, **load)
        assert report.finish_reasons == {"length": 400}
        assert report.failover
        assert report.failover.continued > 0
        assert sum(replica.requests for replica in report.replicas) == 400
        assert report.output_tokens >= run(**load).output_tokens
