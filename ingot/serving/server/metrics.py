"""Prometheus metrics of the server.

Dashboards and autoscalers know vLLM's names, so metrics with the same meaning have those names;
metrics that vLLM does not have start with `ingot:`. Kubernetes' gateway API inference extension
reads the queue (`vllm:num_requests_waiting`), the running requests, the KV-cache usage
(`vllm:kv_cache_usage_perc`) and size (`vllm:cache_config_info`).

Gauges and counters of the engine are taken from its last step when the metrics are read. The
histograms are not prometheus-client's, which take locks for every token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ingot.serving.engine.output import EngineStats
from ingot.serving.workers.wire import EngineReady

_TTFT_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    10,
    30,
    60,
)
_ITL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_E2E_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 600)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


GAUGES = {
    "requests_in_flight": "Admitted requests.",
    "tokens_in_flight": "Tokens reserved by admitted requests.",
    "requests_rejected": "Requests rejected with 429 since the start.",
    "engine_up": "Engine processes that accept requests.",
    "replicas": "Engine processes that run or start, without those that are drained.",
    "queue_delay_seconds": "p90 of the last second; with autoscaling.",
    "engine_restarts": "Restarts of engine processes since the start.",
    "request_retries": "Requests of lost engines that were sent to another since the start.",
    "model_loads": "How often the model was loaded since the start.",
    "canary_drift": "Mean difference of the canary's log-probabilities over shadow traffic.",
    "releases_promoted": "Canaries that were promoted since the start.",
    "releases_rolled_back": "Canaries that were rolled back since the start.",
    "releases_failed": "Versions that could not be loaded since the start.",
}
"""Gauges of a model in the HTTP process, with their descriptions."""
SERVER_GAUGES = {
    "draining": "1 while the server drains.",
    "file_error": "1 while the file of the deployments has an error and is not used.",
    "memory_reserved_bytes": "Memory of the loaded models, as it is counted for the budget.",
}
"""Gauges of the HTTP process, with their descriptions."""


class Histogram:
    """Counts of values by upper bound.

    >>> histogram = Histogram((1, 10))
    >>> for value in (0.5, 1, 7, 70):
    ...     histogram.observe(value)
    >>> histogram.buckets(), histogram.sum
    ([('1', 2), ('10', 3), ('+Inf', 4)], 78.5)
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Count a value."""
        self.sum += value
        self._counts[bisect_left(self._bounds, value)] += 1

    def buckets(self) -> list[tuple[str, float]]:
        """Return each bound and the number of values up to it."""
        counts: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            counts.append((bound, total))
        return counts


class Metrics:
    """Metrics of a model in the HTTP process."""

    def __init__(self) -> None:
        self.ttft = Histogram(_TTFT_SECONDS)
        self.itl = Histogram(_ITL_SECONDS)
        self.e2e = Histogram(_E2E_SECONDS)
        self.prompt_tokens = Histogram(_COUNTS)
        self.generated_tokens = Histogram(_COUNTS)
        self.finish_reasons: Counter[str] = Counter()
        """Requests by finish reason; `abort` is a client that disconnected."""

    def record_request(
        self,
        reason: str,
        *,
        ttft: float | None,
        e2e: float,
        prompt_tokens: int,
        generated_tokens: int,
    ) -> None:
        """Count a request that finished."""
        self.finish_reasons[reason] += 1
        if ttft is not None:
            self.ttft.observe(ttft)
        self.e2e.observe(e2e)
        self.prompt_tokens.observe(prompt_tokens)
        self.generated_tokens.observe(generated_tokens)


class ModelMetrics(NamedTuple):
    """The metrics of a model when they are read."""

    model: str
    metrics: Metrics
    engines: Sequence[tuple[EngineReady | None, EngineStats | None]]
    """Of each replica."""
    gauges: dict[str, float]
    """Values of `GAUGES`."""
    version: str = ""
    role: str = "stable"
    """That of the version."""


class ServerMetrics(NamedTuple):
    """The metrics of the HTTP process when they are read."""

    models: Sequence[ModelMetrics]
    statuses: Mapping[int, int]
    """Responses by status."""
    gauges: Mapping[str, float]
    """Values of `SERVER_GAUGES`."""


class EngineCollector(Collector):
    """Collects all metrics when they are read."""

    def __init__(self, read: Callable[[], ServerMetrics]) -> None:
        self._read = read
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; prometheus-client calls it."""
        server = self._read()
        families: dict[str, Metric] = {}
        for model in server.models:
            for family in _model_metrics(model):
                families.setdefault(family.name, family)
                if families[family.name] is not family:
                    families[family.name].samples += family.samples
        yield from families.values()
        statuses = CounterMetricFamily("ingot:http_responses", "By status.", labels=["status"])
        for status, count in sorted(server.statuses.items()):
            statuses.add_metric([str(status)], count)
        yield statuses
        for name, value in server.gauges.items():
            yield GaugeMetricFamily(f"ingot:{name}", SERVER_GAUGES[name], value=value)


def _model_metrics(model: ModelMetrics) -> Iterator[Metric]:
    metrics = model.metrics
    labels, values = ["model_name", "engine", "version"], [model.model, "0", model.version]
    yield from _engine_metrics(model)
    for name, text, histogram in (
        ("time_to_first_token_seconds", "Time to first token.", metrics.ttft),
        ("inter_token_latency_seconds", "Inter-token latency.", metrics.itl),
        ("e2e_request_latency_seconds", "End-to-end latency of a request.", metrics.e2e),
        ("request_prompt_tokens", "Prompt tokens of a request.", metrics.prompt_tokens),
        ("request_generation_tokens", "Generated tokens of a request.", metrics.generated_tokens),
    ):
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=labels)
        family.add_metric(values, histogram.buckets(), histogram.sum)
        yield family
    reasons = CounterMetricFamily(
        "vllm:request_success", "Requests by finish reason.", labels=[*labels, "finished_reason"]
    )
    for reason in ("stop", "length", "tool_calls", "abort", "error"):
        reasons.add_metric([*values, reason], metrics.finish_reasons[reason])
    yield reasons
    for name, value in model.gauges.items():
        gauge = GaugeMetricFamily(f"ingot:{name}", GAUGES[name], labels=["model_name", "version"])
        gauge.add_metric([model.model, model.version], value)
        yield gauge
    roles = ["model_name", "version", "role"]
    info = GaugeMetricFamily("ingot:version", "1 for each version of a model.", labels=roles)
    info.add_metric([model.model, model.version, model.role], 1)
    yield info


def _engine_metrics(model: ModelMetrics) -> Iterator[Metric]:
    """Yield what each engine reports; the label `engine` is the number of the replica."""
    labels, engines = ["model_name", "engine", "version"], model.engines
    caches = InfoMetricFamily("vllm:cache_config", "Blocks of the KV cache.")
    for index, (info, _) in enumerate(engines):
        if info is not None and info.num_blocks:
            sizes = {
                "block_size": str(info.block_size),
                "num_gpu_blocks": str(info.num_blocks),
                "cache_dtype": info.kv_cache_dtype,
            }
            values = dict(zip(labels, [model.model, str(index), model.version], strict=True))
            caches.add_metric([], {**values, **sizes})
    if caches.samples:
        yield caches
    all_stats = [(index, stats) for index, (_, stats) in enumerate(engines) if stats]
    for name, text, field in _ENGINE_METRICS if all_stats else ():
        kind = GaugeMetricFamily if name in _ENGINE_GAUGES else CounterMetricFamily
        family = kind(name, text, labels=labels)
        for index, stats in all_stats:
            family.add_metric([model.model, str(index), model.version], field(stats))
        yield family


_ENGINE_METRICS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:num_requests_running", "Running requests.", lambda s: s.num_running),
    ("vllm:num_requests_waiting", "Waiting requests.", lambda s: s.num_waiting),
    (
        "vllm:kv_cache_usage_perc",
        "KV-cache usage, from 0 to 1.",
        lambda s: s.num_used_blocks / max(s.num_blocks, 1),
    ),
    ("vllm:prompt_tokens", "Prompt tokens.", lambda s: s.prompt_tokens),
    ("vllm:generation_tokens", "Generated tokens.", lambda s: s.generated_tokens),
    ("vllm:prefix_cache_queries", "Prompt tokens looked up.", lambda s: s.prompt_tokens),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", lambda s: s.cached_tokens),
    ("vllm:num_preemptions", "Preempted requests.", lambda s: s.preemptions),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens.", lambda s: s.draft_tokens),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Accepted draft tokens.",
        lambda s: s.accepted_tokens,
    ),
    ("ingot:engine_steps", "Engine steps.", lambda s: s.steps),
    ("ingot:engine_failed_steps", "Failed engine steps.", lambda s: s.failed_steps),
)
_ENGINE_GAUGES = frozenset(name for name, *_ in _ENGINE_METRICS[:3])
