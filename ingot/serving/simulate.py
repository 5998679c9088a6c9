"""Simulate a server: the real scheduler, a synthetic workload and a cost model instead of a model.

Only time is simulated. A step of T tokens takes

    overhead_s
    + weight_bytes / bandwidth + T * flops_per_token / peak_flops   the matrices, read once a step
    + keys * kv_bytes_per_token / bandwidth                         KV-cache reads of attention
    + pairs * attention_flops / peak_flops                          its FLOPs during prefill

and the simulated clock advances by that. (A sum: measured steps are nearer to it than to the
larger of memory and compute time.) The scheduler's decisions are those of the engine, so queueing,
batching, prefix hits, preemption and rejection are those of a server. Use it to size a deployment
or to judge a change of the scheduler.

The workload is generated from a seed: arrivals are Poisson or bursts; lengths are lognormal, as
they are in production traces; some prompts start with one of a few shared prefixes.
"""

from __future__ import annotations

import math
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError
from ingot.serving.engine.request import Abort, FinishReason, Request
from ingot.serving.engine.scheduler import (
    Event,
    ScheduledSeq,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepDone,
)

PERCENTILES = (50, 90, 99)
_UNIQUE_TOKEN = 2**31  # token ids from here on are not part of a shared prefix
_SAMPLED = (0,)
_PROGRESS_EVERY = 1000  # finished requests between two calls of `progress`


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Cost of a step of a model on a machine. Default: SmolLM2-135M, bfloat16, two cores with AMX.

    >>> round(CostModel().step_seconds(1, 100, 0) * 1e3, 1)
    10.2
    """

    weight_bytes: float = 269e6
    """Bytes of weights that a step reads."""
    flops_per_token: float = 269e6
    """FLOPs of a token in the matrices: twice their elements."""
    kv_bytes_per_token: float = 23040.0
    """Bytes of keys and values of a token."""
    attention_flops: float = 69120.0
    """FLOPs of a pair of query and key: 4 * layers * heads * head_dim."""
    bandwidth: float = 30e9
    """Bytes per second."""
    peak_flops: float = 1.6e12
    """FLOPs per second."""
    overhead_s: float = 1e-3
    """Fixed seconds of a step: scheduling, sampling, sending."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0) or (name in _DIVISORS and not value):
                raise ConfigError(f"{name} is {value}", hint="give a positive number")

    def step_seconds(self, tokens: int, keys: int, pairs: float) -> float:
        """Return the duration of a step that computes `tokens` and reads `keys`; `pairs` counts
        those of a query and a key in requests with several tokens."""
        matrices = (
            self.weight_bytes / self.bandwidth + tokens * self.flops_per_token / self.peak_flops
        )
        reading = keys * self.kv_bytes_per_token / self.bandwidth
        return self.overhead_s + matrices + reading + pairs * self.attention_flops / self.peak_flops


_DIVISORS = ("bandwidth", "peak_flops")


def count_work(scheduled: Sequence[ScheduledSeq]) -> tuple[int, int, float]:
    """Return the number of tokens, keys and query-key pairs of a step.

    >>> decode = ScheduledSeq(1, 100, (5,), (), True)
    >>> count_work([decode, ScheduledSeq(2, 0, (5, 6, 7, 8), (), True)])
    (5, 105, 8.0)
    """
    counts = [len(seq.tokens) for seq in scheduled]
    starts = [seq.start for seq in scheduled]
    pairs = sum(n * (at + n / 2) for n, at in zip(counts, starts, strict=True) if n > 1)
    return sum(counts), sum(counts) + sum(starts), pairs


@dataclass(frozen=True, kw_only=True)
class RequestWorkload:
    """Synthetic requests: how many, how often, how long.

    >>> workload = RequestWorkload(num_requests=1000, request_rate=10.0)
    >>> arrivals = [arrival for arrival, _, _ in workload.generate()]
    >>> len(arrivals), round(arrivals[-1])
    (1000, 103)
    """

    num_requests: int = 10_000
    request_rate: float = 8.0
    """Mean requests per second."""
    burst_size: int = 1
    """Requests that arrive together; 1 is a Poisson process."""
    input_len: int = 128
    """Mean prompt length in tokens, without the shared prefix."""
    output_len: int = 64
    """Mean output length in tokens."""
    length_sigma: float = 0.8
    """Sigma of both lognormal lengths; 0 for constant lengths."""
    max_len: int = 4096
    """Maximum prompt length, and maximum output length."""
    shared_prefix_ratio: float = 0.5
    """Fraction of prompts that start with a shared prefix."""
    prefix_len: int = 256
    """Tokens of a shared prefix."""
    num_prefixes: int = 20
    """Number of distinct shared prefixes."""
    cancel_ratio: float = 0.0
    """Fraction of requests whose client disconnects, after 2 seconds on average."""
    deadline: float | None = None
    """Seconds after which a request is dropped."""
    seed: int = 0

    def __post_init__(self) -> None:
        count = (1, 10**7)
        check_bounds(
            self,
            num_requests=count,
            burst_size=count,
            input_len=count,
            output_len=count,
            max_len=count,
            prefix_len=count,
            num_prefixes=count,
            request_rate=(1e-6, 1e9),
            length_sigma=(0, 4),
            shared_prefix_ratio=(0, 1),
            cancel_ratio=(0, 1),
        )
        if self.deadline is not None:
            check_bounds(self, deadline=(0, 1e9))
        if self.prefix_len * self.num_prefixes > 10**7:
            raise ConfigError(
                "prefix_len * num_prefixes: expected at most 10,000,000, got "
                f"{self.prefix_len * self.num_prefixes:,}",
                hint="lower one of them",
            )

    def generate(self) -> Iterator[tuple[float, Request, float | None]]:
        """Yield arrival time, request, and the time at which its client disconnects, if any."""
        numbers, now = random.Random(self.seed), 0.0
        size = self.prefix_len
        prefixes = [tuple(range(p * size, (p + 1) * size)) for p in range(self.num_prefixes)]
        for id in range(self.num_requests):
            if id % self.burst_size == 0:
                now += numbers.expovariate(self.request_rate / self.burst_size)
            length = self._length(numbers, self.input_len)
            shared = numbers.random() < self.shared_prefix_ratio
            prefix = numbers.choice(prefixes) if shared else ()
            # Unique because of its first token: block keys cover all tokens before.
            tail = (_UNIQUE_TOKEN + id, *range(1, length))
            cancels = numbers.random() < self.cancel_ratio
            yield (
                now,
                Request(
                    id=id,
                    prompt=prefix + tail,
                    max_tokens=self._length(numbers, self.output_len),
                    deadline=None if self.deadline is None else now + self.deadline,
                ),
                now + numbers.expovariate(0.5) if cancels else None,
            )

    def _length(self, numbers: random.Random, mean: int) -> int:
        sigma = self.length_sigma
        length = numbers.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        return max(1, min(self.max_len, round(length)))


@dataclass(frozen=True, kw_only=True)
class SLO:
    """Service level objective: requests that meet it count as goodput."""

    ttft: float = 1.0
    """Maximum time to first token, in seconds."""
    tpot: float = 0.1
    """Maximum time per output token after the first, in seconds, averaged over the request."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """Results of a load test. Latencies are percentiles in seconds, of completed requests."""

    num_requests: int
    finish_reasons: dict[str, int]
    duration_s: float
    """From the first arrival to the last token."""
    requests_per_s: float
    goodput_per_s: float
    """Requests per second that met the SLO."""
    output_tokens: int
    output_tokens_per_s: float
    ttft: dict[str, float]
    """Time to first token."""
    itl: dict[str, float]
    """Inter-token latency."""
    e2e: dict[str, float]
    """End-to-end latency."""


@dataclass(frozen=True, kw_only=True)
class SimulationReport(LoadReport):
    """Results in simulated time, and statistics of the scheduler."""

    prompt_tokens: int
    hit_rate: float
    """Fraction of tokens that were found in the prefix cache instead of computed."""
    preemptions: int
    steps: int
    tokens_per_step: float
    decisions: int
    """Number of scheduled sequences, summed over the steps."""
    decisions_per_s: float
    """Per second of CPU time in the scheduler."""
    steps_per_s: float
    """Per second of CPU time in the scheduler."""
    wall_seconds: float


def percentiles(values: Any, counts: Any = None) -> dict[str, float]:
    """Return the percentiles of values, or of values that occur `counts` times each.

    >>> percentiles([0.5, 2.0], counts=[95, 5])
    {'p50': 0.5, 'p90': 0.5, 'p99': 2.0}
    >>> percentiles([])
    {}
    """
    import numpy as np  # here: the scheduler's simulator starts without it

    if not len(values):
        return {}
    if counts is None:
        levels = np.percentile(values, PERCENTILES)
    else:
        levels = np.percentile(values, PERCENTILES, weights=counts, method="inverted_cdf")
    return {f"p{p}": round(float(v), 4) for p, v in zip(PERCENTILES, levels, strict=True)}


def simulate(
    config: SchedulerConfig,
    costs: CostModel,
    workload: RequestWorkload,
    slo: SLO,
    progress: Callable[[int], object] = lambda finished: None,
) -> SimulationReport:
    """Serve the workload; `progress` is called with the number of newly finished requests.

    >>> config, workload = SchedulerConfig(num_blocks=512), RequestWorkload(num_requests=100)
    >>> simulate(config, CostModel(), workload, SLO()).finish_reasons
    {'length': 100}
    """
    return _Simulation(config, costs, workload, slo).run(progress)


class _SimulatedClient:
    """A request in progress, and when its tokens arrived."""

    __slots__ = ("arrival", "first_token_at", "last_token_at", "request")

    def __init__(self, arrival: float, request: Request) -> None:
        self.arrival, self.request = arrival, request
        self.first_token_at = self.last_token_at = math.nan


class _Simulation:
    def __init__(
        self, config: SchedulerConfig, costs: CostModel, workload: RequestWorkload, slo: SLO
    ) -> None:
        self.costs, self.workload, self.slo = costs, workload, slo
        self.scheduler = Scheduler(config)
        self.now = 0.0
        self.clients: dict[int, _SimulatedClient] = {}
        self.disconnects: list[tuple[float, int]] = []  # a heap
        self.finish_reasons: Counter[str] = Counter()
        self.ttft, self.e2e = array("d"), array("d")
        self.itl: Counter[int] = Counter()  # by bucket
        self.num_good = self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.preemptions = self.steps = self.decisions = self.computed_tokens = 0
        self.scheduler_seconds = 0.0

    def run(self, progress: Callable[[int], object]) -> SimulationReport:
        begin = time.perf_counter()
        arrivals = self.workload.generate()
        upcoming, finished = next(arrivals, None), 0
        events: list[Event] = []
        while True:
            while upcoming and upcoming[0] <= self.now:
                self._add_request(*upcoming, events)
                upcoming = next(arrivals, None)
            while self.disconnects and self.disconnects[0][0] <= self.now:
                events.append(Abort(heappop(self.disconnects)[1], FinishReason.CANCELLED))
            plan = self._schedule(events)
            self._record(plan)
            finished += len(plan.finished)
            if finished >= _PROGRESS_EVERY:
                progress(finished)
                finished = 0
            if plan.scheduled:
                events = [self._compute(plan)]
            elif upcoming:
                events, self.now = [], max(self.now, upcoming[0])
            else:
                progress(finished)
                return self._report(time.perf_counter() - begin)

    def _add_request(
        self, arrival: float, request: Request, disconnect: float | None, events: list[Event]
    ) -> None:
        self.clients[request.id] = _SimulatedClient(arrival, request)
        self.prompt_tokens += len(request.prompt)
        events.append(request)
        if disconnect is not None:
            heappush(self.disconnects, (disconnect, request.id))

    def _schedule(self, events: list[Event]) -> SchedulerOutput:
        begin = time.thread_time()  # CPU time: other processes do not count
        plan = self.scheduler.step(self.now, events)
        self.scheduler_seconds += time.thread_time() - begin
        return plan

    def _record(self, plan: SchedulerOutput) -> None:
        self.preemptions += len(plan.preempted)
        for admitted in plan.admitted:
            self.cached_tokens += admitted.num_cached_tokens
        for finished in plan.finished:
            self.finish_reasons[finished.reason.value] += 1
            client = self.clients.pop(finished.id)
            if finished.reason is FinishReason.LENGTH:
                self._record_latency(client)

    def _record_latency(self, client: _SimulatedClient) -> None:
        ttft, tokens = client.first_token_at - client.arrival, client.request.max_tokens
        self.ttft.append(ttft)
        self.e2e.append(client.last_token_at - client.arrival)
        tpot = (client.last_token_at - client.first_token_at) / max(1, tokens - 1)
        self.num_good += ttft <= self.slo.ttft and tpot <= self.slo.tpot

    def _compute(self, plan: SchedulerOutput) -> StepDone:
        """Advance the clock by the duration of the step."""
        scheduled, before = plan.scheduled, self.now
        tokens, keys, pairs = count_work(scheduled)
        self.now = now = before + self.costs.step_seconds(tokens, keys, pairs)
        self.steps += 1
        self.decisions += len(scheduled)
        self.computed_tokens += tokens
        clients, steady = self.clients, 0
        sampled: list[tuple[int, ...]] = []
        for seq in scheduled:
            if not seq.needs_sampling:
                sampled.append(())
                continue
            sampled.append(_SAMPLED)
            client = clients[seq.id]
            if client.last_token_at == before:
                steady += 1
            elif math.isnan(client.first_token_at):
                client.first_token_at = now
            else:
                self.itl[_bucket(now - client.last_token_at)] += 1
            client.last_token_at = now
        self.output_tokens += len(scheduled) - sampled.count(())
        if steady:
            self.itl[_bucket(now - before)] += steady
        return StepDone(plan.step, tuple(sampled))

    def _report(self, wall: float) -> SimulationReport:
        seconds = max(self.now, 1e-9)
        total_tokens = self.cached_tokens + self.computed_tokens
        return SimulationReport(
            num_requests=self.workload.num_requests,
            finish_reasons=dict(sorted(self.finish_reasons.items())),
            duration_s=round(seconds, 3),
            requests_per_s=round(len(self.e2e) / seconds, 3),
            goodput_per_s=round(self.num_good / seconds, 3),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            output_tokens_per_s=round(self.output_tokens / seconds, 1),
            ttft=_bucket_percentiles(map(_bucket, self.ttft)),
            itl=_bucket_percentiles(self.itl),
            e2e=_bucket_percentiles(map(_bucket, self.e2e)),
            hit_rate=round(self.cached_tokens / max(1, total_tokens), 4),
            preemptions=self.preemptions,
            steps=self.steps,
            tokens_per_step=round(self.computed_tokens / max(1, self.steps), 2),
            decisions=self.decisions,
            decisions_per_s=round(self.decisions / max(self.scheduler_seconds, 1e-9)),
            steps_per_s=round(self.steps / max(self.scheduler_seconds, 1e-9)),
            wall_seconds=round(wall, 2),
        )


def _bucket(seconds: float) -> int:
    """Count durations within one percent together: a million requests have many."""
    return round(100 * math.log(max(seconds, 1e-9)))


def _bucket_percentiles(buckets: Iterable[int] | Counter[int]) -> dict[str, float]:
    counts = Counter(buckets)
    return percentiles([math.exp(b / 100) for b in counts], list(counts.values()))
