from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError
from ingot.serving.engine.scheduler import Limits
from ingot.serving.simulate import Costs, Goal, Report, Trace, _bucket, _percentiles, simulate

FREE = Costs(weights=0, flops=0, kv=0, attention=0, overhead=1.0)  # every step takes a second


def run(limits: Limits | None = None, costs: Costs | None = None, **trace: Any) -> Report:
    return simulate(limits or Limits(blocks=512), costs or Costs(), Trace(**trace), Goal())


def test_one_request_takes_as_long_as_its_steps() -> None:
    """100 tokens of prompt in chunks of 64: two steps, and one more for each other token."""
    limits = Limits(blocks=512, budget=16, max_running=16)  # bursts of 64
    report = run(limits, FREE, requests=1, prompt=100, output=10, spread=0, shared=0)
    assert report.steps == report.decisions == 11
    assert report.output_tokens == 10
    assert report.tokens_per_step == pytest.approx(109 / 11, abs=0.01)
    assert report.between_tokens == {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    assert report.first_token["p50"] == pytest.approx(2, rel=0.01)
    assert report.total["p50"] == pytest.approx(11, rel=0.01)


def test_a_step_takes_reading_and_arithmetic() -> None:
    costs = Costs(
        weights=100, flops=10, kv=3, attention=7, bandwidth=100, peak=1000, overhead=0.125
    )
    assert costs.seconds(0, 0, 0) == 1.125
    assert costs.seconds(300, 0, 0) == pytest.approx(1.125 + 3)
    assert costs.seconds(0, 50, 0) == pytest.approx(1.125 + 1.5)
    assert costs.seconds(0, 0, 1000) == pytest.approx(1.125 + 7)


@pytest.mark.parametrize(
    ("costs", "seconds"),
    [
        # Each step reads its whole context; pairs are half of the square of the prompt.
        ({"kv": 1.0}, 64 + 100 + sum(range(101, 110))),
        ({"attention": 1.0}, 100 * 100 / 2),
        ({"flops": 1.0}, 109),
        ({"weights": 1.0}, 11),
    ],
)
def test_a_request_costs_what_it_reads_and_computes(
    costs: dict[str, float], seconds: float
) -> None:
    only = {"weights": 0.0, "flops": 0.0, "kv": 0.0, "attention": 0.0, "overhead": 0.0, **costs}
    model = Costs(bandwidth=1.0, peak=1.0, **only)
    limits = Limits(blocks=512, budget=16, max_running=16)  # bursts of 64
    report = run(limits, model, requests=1, prompt=100, output=10, spread=0, shared=0)
    assert report.total["p50"] == pytest.approx(seconds, rel=0.006)


def test_a_shared_prefix_is_computed_once() -> None:
    """Every request has 256 tokens of the same and 32 of its own, and all but the first find the
    prefix: 256 of 288 + 1 tokens, the last sampled one not being computed."""
    report = run(requests=200, rate=1, shared=1, prefixes=1, prompt=32, output=2, spread=0)
    assert report.hit_rate == pytest.approx(199 * 256 / (200 * 289), abs=1e-4)
    alone = run(requests=200, rate=1, shared=0, prompt=288, output=2, spread=0)
    assert alone.hit_rate == 0
    assert report.first_token["p50"] < alone.first_token["p50"] / 3


def test_too_few_blocks_lead_to_preemption_and_everything_is_answered() -> None:
    report = run(Limits(blocks=64), requests=100, rate=100, prompt=100, output=200, longest=1000)
    assert report.preemptions > 0
    assert report.ends == {"length": 100}
    roomy = run(Limits(blocks=4096), requests=100, rate=100, prompt=100, output=200, longest=1000)
    assert roomy.preemptions == 0
    assert roomy.output_tokens == report.output_tokens
    assert roomy.seconds < report.seconds


def test_every_request_ends_once_whatever_happens() -> None:
    limits = Limits(blocks=256, max_waiting=50)
    report = run(limits, requests=1000, rate=40, cancelled=0.3, deadline=3.0, burst=20)
    assert sum(report.ends.values()) == 1000
    assert set(report.ends) == {"length", "cancelled", "deadline", "refused"}


def test_goodput_counts_only_what_keeps_the_goal() -> None:
    def goodput(first: float, between: float) -> float:
        goal, trace = Goal(first=first, between=between), Trace(requests=300, rate=30)
        return simulate(Limits(blocks=512), Costs(), trace, goal).goodput_per_s

    assert goodput(1e9, 1e9) == run(requests=300, rate=30).requests_per_s
    assert 0 < goodput(0.2, 1e9) < goodput(1e9, 1e9)
    assert 0 < goodput(1e9, 0.03) < goodput(1e9, 1e9)


def test_the_same_seed_is_the_same_run() -> None:
    def results(seed: int) -> dict[str, Any]:
        measured = ("decisions_per_s", "steps_per_s", "wall_seconds")
        report = dataclasses.asdict(run(requests=200, seed=seed))
        return {name: value for name, value in report.items() if name not in measured}

    assert results(1) == results(1) != results(2)


def test_a_trace_is_what_it_is_asked_to_be() -> None:
    trace = Trace(requests=20_000, rate=5, burst=10, prompt=100, output=50, shared=0.25, prefix=7)
    drawn = list(trace.draw())
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
    simulate(Limits(blocks=512), Costs(), Trace(requests=2500, output=2), Goal(), heard.append)
    assert sum(heard) == 2500
    assert len(heard) == 3


@given(st.lists(st.floats(1e-6, 1e3), min_size=1), st.sampled_from([50, 90, 99]))
def test_percentiles_are_within_a_percent(values: list[float], percentile: int) -> None:
    exact = sorted(values)[math.ceil(len(values) * percentile / 100) - 1]
    found = _percentiles(Counter(map(_bucket, values)))[f"p{percentile}"]
    assert found == pytest.approx(exact, rel=0.006, abs=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests": 0},
        {"rate": 0.0},
        {"rate": math.nan},
        {"shared": 1.5},
        {"deadline": -1.0},
        {"prefix": 10**5, "prefixes": 10**5},
    ],
)
def test_a_trace_is_bounded(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Trace(**wrong)


@pytest.mark.parametrize("wrong", [{"bandwidth": 0.0}, {"peak": math.nan}, {"overhead": -1.0}])
def test_costs_are_bounded(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Costs(**wrong)
