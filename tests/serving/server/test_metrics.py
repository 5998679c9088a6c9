"""The page that Prometheus reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families as parse

from ingot.serving.engine.output import EngineStats
from ingot.serving.server.metrics import (
    EngineCollector,
    Histogram,
    Metrics,
    ModelMetrics,
    ServerMetrics,
)
from ingot.serving.workers.wire import EngineReady
from tests.serving.server.messages import READY

STATS = EngineStats(
    **{**dict.fromkeys(EngineStats.__struct_fields__, 3), "num_blocks": 20, "num_used_blocks": 5}
)


def render(models: list[ModelMetrics]) -> list[Metric]:
    server = ServerMetrics(models, {200: 1}, {"draining": 0.0})
    return list(parse(EngineCollector(lambda: server).render().decode()))


def page(metrics: Metrics, info: EngineReady | None, stats: EngineStats | None) -> dict[str, float]:
    model = ModelMetrics('a "model"\n', metrics, [(info, stats)], {"engine_up": 1.0})
    families = render([model])
    return {
        sample.name
        + sample.labels.get("le", sample.labels.get("finished_reason", "")): sample.value
        for family in families
        for sample in family.samples
    }


def test_names_that_dashboards_and_gateways_know() -> None:
    metrics = Metrics()
    metrics.record_request("stop", ttft=0.03, e2e=0.7, prompt_tokens=12, generated_tokens=5)
    metrics.record_request("abort", ttft=None, e2e=0.1, prompt_tokens=3, generated_tokens=0)
    metrics.itl.observe(0.02)
    found = page(metrics, READY, STATS)
    for name, value in {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 3,
        "vllm:generation_tokens_total": 3,
        "vllm:prefix_cache_queries_total": 3,
        "vllm:prefix_cache_hits_total": 3,
        "vllm:num_preemptions_total": 3,
        "vllm:cache_config_info": 1,
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:time_to_first_token_seconds_bucket0.04": 1,
        "vllm:time_to_first_token_seconds_bucket0.02": 0,
        "vllm:inter_token_latency_seconds_sum": 0.02,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_prompt_tokens_sum": 15,
        "vllm:request_generation_tokens_sum": 5,
        "vllm:request_success_totalstop": 1,
        "vllm:request_success_totalabort": 1,
        "vllm:request_success_totallength": 0,
        "ingot:http_responses_total": 1,
        "ingot:engine_up": 1,
    }.items():
        assert found[name] == value, name


def test_each_replica_has_its_samples_in_one_family() -> None:
    engines = [(READY, STATS), (None, None), (READY, STATS)]
    families = render([ModelMetrics("m", Metrics(), engines, {})])
    assert len({family.name for family in families}) == len(families)
    labels = [
        sample.labels["engine"]
        for family in families
        for sample in family.samples
        if sample.name in ("vllm:prompt_tokens_total", "vllm:cache_config_info")
    ]
    assert sorted(labels) == ["0", "0", "2", "2"]


def test_before_there_is_an_engine_there_is_a_page() -> None:
    found = page(Metrics(), None, None)
    assert "vllm:num_requests_running" not in found
    assert found["ingot:engine_up"] == 1


def test_a_family_has_the_samples_of_all_models() -> None:
    models = [
        ModelMetrics(name, Metrics(), [(READY, STATS)], {"engine_up": float(name == "a")})
        for name in ("a", "b")
    ]
    families = {family.name: family for family in render(models)}
    assert len(families) == len(render(models)), "a family is on the page once"
    for name in ("ingot:engine_up", "vllm:num_requests_running", "vllm:cache_config_info"):
        assert {one.labels["model_name"] for one in families[name].samples} == {"a", "b"}
    up = {one.labels["model_name"]: one.value for one in families["ingot:engine_up"].samples}
    assert up == {"a": 1.0, "b": 0.0}


@given(st.lists(st.floats(0, 100), max_size=30))
def test_a_histogram_counts_everything_once(values: list[float]) -> None:
    histogram = Histogram((1, 10))
    for value in values:
        histogram.observe(value)
    assert histogram.buckets() == [
        ("1", sum(v <= 1 for v in values)),
        ("10", sum(v <= 10 for v in values)),
        ("+Inf", len(values)),
    ]
