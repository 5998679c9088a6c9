"""The server's figures for Prometheus.

Dashboards and autoscalers know vLLM's names, so those are the names here where the meaning is the
same; what vLLM has no name for begins with `ingot:`. Kubernetes' gateway API inference extension
asks for the queue (`vllm:num_requests_waiting`), the running requests, the use of the KV cache
(`vllm:kv_cache_usage_perc`) and its size (`vllm:cache_config_info`).

Gauges and sums of the engine are read off its last step when somebody asks. Histograms are our
own, as those of prometheus-client take locks that a token need not pay for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

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
from ingot.serving.server.wire import Hello

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
_TOTAL = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 600)
_COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Histogram:
    """How often values fell below which bound.

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
        """The bounds, and how many values are not above each."""
        found: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            found.append((bound, total))
        return found


class Metrics:
    """What is counted in the HTTP process."""

    def __init__(self) -> None:
        self.first = Histogram(_SECONDS)
        self.between = Histogram(_BETWEEN)
        self.total = Histogram(_TOTAL)
        self.prompt = Histogram(_COUNTS)
        self.generated = Histogram(_COUNTS)
        self.ends: Counter[str] = Counter()
        """Answers by how they ended: stop, length, abort (the client left), error."""
        self.statuses: Counter[int] = Counter()
        """Responses by their status."""

    def answered(
        self, end: str, *, first: float | None, total: float, prompt: int, generated: int
    ) -> None:
        """Count an answer that has ended, after so many seconds."""
        self.ends[end] += 1
        if first is not None:
            self.first.observe(first)
        self.total.observe(total)
        self.prompt.observe(prompt)
        self.generated.observe(generated)


class Facts(Collector):
    """All figures at the moment they are asked for."""

    def __init__(
        self,
        metrics: Metrics,
        model: str,
        engine: Callable[[], tuple[Hello | None, EngineStats | None]],
        gauges: Callable[[], dict[str, float]],
    ) -> None:
        self._metrics, self._model, self._engine, self._gauges = metrics, model, engine, gauges
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def page(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; prometheus-client calls it."""
        hello, stats = self._engine()
        metrics, labels, of = self._metrics, ["model_name", "engine"], [self._model, "0"]
        if stats is not None:
            yield from _engine_metrics(stats, labels, of)
        if hello is not None:
            info = InfoMetricFamily("vllm:cache_config", "The blocks of the KV cache.")
            sizes = {"block_size": str(hello.block_size), "num_gpu_blocks": str(hello.blocks)}
            info.add_metric([], {**dict(zip(labels, of, strict=True)), **sizes})
            yield info
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From a request to its first token.", metrics.first),
            ("inter_token_latency_seconds", "Between tokens of an answer.", metrics.between),
            ("e2e_request_latency_seconds", "From a request to its end.", metrics.total),
            ("request_prompt_tokens", "Tokens of a prompt.", metrics.prompt),
            ("request_generation_tokens", "Tokens of an answer.", metrics.generated),
        ):
            family = HistogramMetricFamily(f"vllm:{name}", text, labels=labels)
            family.add_metric(of, histogram.buckets(), histogram.sum)
            yield family
        ends = CounterMetricFamily(
            "vllm:request_success", "Answers by their end.", labels=[*labels, "finished_reason"]
        )
        for reason in ("stop", "length", "abort", "error"):
            ends.add_metric([*of, reason], metrics.ends[reason])
        yield ends
        statuses = CounterMetricFamily("ingot:http_responses", "By status.", labels=["status"])
        for status, count in sorted(metrics.statuses.items()):
            statuses.add_metric([str(status)], count)
        yield statuses
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(f"ingot:{name}", name.replace("_", " "), value=value)


def _engine_metrics(stats: EngineStats, labels: list[str], of: list[str]) -> Iterator[Metric]:
    usage = stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0
    for name, text, value in (
        ("num_requests_running", "Requests that have blocks.", stats.num_running),
        ("num_requests_waiting", "Requests that wait for blocks.", stats.num_waiting),
        ("kv_cache_usage_perc", "Used share of the KV cache, from 0 to 1.", usage),
    ):
        gauge = GaugeMetricFamily(f"vllm:{name}", text, labels=labels)
        gauge.add_metric(of, value)
        yield gauge
    for name, text, value in (
        ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
        ("generation_tokens", "Tokens generated.", stats.generated_tokens),
        ("prefix_cache_queries", "Prompt tokens looked up.", stats.prompt_tokens),
        ("prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_tokens),
        ("num_preemptions", "Requests whose blocks went to others.", stats.preemptions),
        ("spec_decode_num_draft_tokens", "Tokens proposed.", stats.draft_tokens),
        ("spec_decode_num_accepted_tokens", "Of them, accepted.", stats.accepted_tokens),
    ):
        counter = CounterMetricFamily(f"vllm:{name}", text, labels=labels)
        counter.add_metric(of, value)
        yield counter
    for name, text, value in (
        ("engine_steps", "Steps since its start.", stats.steps),
        ("engine_failed_steps", "Steps that failed.", stats.failed_steps),
    ):
        counter = CounterMetricFamily(f"ingot:{name}", text, labels=labels)
        counter.add_metric(of, value)
        yield counter
