"""The real scheduler on a made-up runner, for a million requests of a made-up trace.

Only time is not real. A step of T tokens takes

    overhead
    + weights / bandwidth + T * flops / peak     the matrices, read once a step
    + keys * kv / bandwidth                      what each request's attention reads
    + pairs * attention / peak                   and computes, where it has several tokens

and a clock of its own goes on by that. (A sum: real steps are nearer to it than to the larger of
reading and computing.) What is planned is what the engine would plan, so queueing, batching, prefix
hits, preemption and refusal are those of a server: that is how a fleet is sized, and how a change
to the scheduler is judged.

The trace is drawn from a seed: arrivals are Poisson, or bursts of them; lengths are lognormal,
as those of people are; a share of the prompts begins with one of a few prefixes.
"""

from __future__ import annotations

import math
import random
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ingot.core.errors import ConfigError
from ingot.serving.engine.request import End, Reason, Request
from ingot.serving.engine.scheduler import Event, Limits, Plan, Retire, Scheduler, Work

PERCENTILES = (50, 90, 99)
_OWN = 2**31  # tokens from here on are in no prefix
_SAMPLED = (0,)
_REPORT = 1000  # requests between two words about progress


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a step costs: a model on a machine. SmolLM2-135M in bfloat16 on two cores with AMX.

    >>> round(Costs().seconds(1, 100, 0) * 1e3, 1)
    10.2
    """

    weights: float = 269e6
    """Bytes of weights that a step reads."""
    flops: float = 269e6
    """FLOPs of a token in the matrices: twice their elements."""
    kv: float = 23040.0
    """Bytes of keys and values of a token."""
    attention: float = 69120.0
    """FLOPs of a query and a key: 4 * layers * heads * head_dim."""
    bandwidth: float = 30e9
    """Bytes a second."""
    peak: float = 1.6e12
    """FLOPs a second."""
    overhead: float = 1e-3
    """Seconds of a step besides: planning, sampling, sending."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0) or (name in _DIVISORS and not value):
                raise ConfigError(f"{name} is {value}", hint="give a positive number")

    def seconds(self, tokens: int, keys: int, pairs: float) -> float:
        """Of a step of so many tokens, which reads so many keys; `pairs` are those of a query and
        a key in requests that have several tokens."""
        matrices = self.weights / self.bandwidth + tokens * self.flops / self.peak
        reading, computing = keys * self.kv / self.bandwidth, pairs * self.attention / self.peak
        return self.overhead + matrices + reading + computing


_DIVISORS = ("bandwidth", "peak")


def counted(work: Sequence[Work]) -> tuple[int, int, float]:
    """The tokens, keys and pairs of a step.

    >>> counted([Work(1, 100, (5,), (), True), Work(2, 0, (5, 6, 7, 8), (), True)])
    (5, 105, 8.0)
    """
    counts = [len(item.tokens) for item in work]
    starts = [item.start for item in work]
    pairs = sum(n * (at + n / 2) for n, at in zip(counts, starts, strict=True) if n > 1)
    return sum(counts), sum(counts) + sum(starts), pairs


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The requests: how many, how often, how long.

    >>> trace = Trace(requests=1000, rate=10.0)
    >>> arrivals = [arrival for arrival, _, _ in trace.draw()]
    >>> len(arrivals), round(arrivals[-1])
    (1000, 103)
    """

    requests: int = 10_000
    rate: float = 8.0
    """Requests a second, on average."""
    burst: int = 1
    """So many come together; 1 is Poisson."""
    prompt: int = 128
    """Tokens of a prompt, on average, without its prefix."""
    output: int = 64
    """Tokens of an answer, on average."""
    spread: float = 0.8
    """The sigma of both lognormals; 0 for all the same."""
    longest: int = 4096
    """Tokens of the longest prompt, and of the longest answer."""
    shared: float = 0.5
    """The share of prompts that have a prefix before them which others have, too."""
    prefix: int = 256
    """Tokens of a prefix."""
    prefixes: int = 20
    """How many prefixes there are."""
    cancelled: float = 0.0
    """The share of requests whose client leaves, after 2 seconds on average."""
    deadline: float | None = None
    """Seconds after which an answer is worth nothing."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("requests", "burst", "prompt", "output", "longest", "prefix", "prefixes"):
            _within(name, getattr(self, name), 1, 10**7)
        _within("prefix * prefixes", self.prefix * self.prefixes, 1, 10**7)
        _within("rate", self.rate, 1e-6, 1e9)
        _within("spread", self.spread, 0, 4)
        _within("shared", self.shared, 0, 1)
        _within("cancelled", self.cancelled, 0, 1)
        _within("deadline", 1 if self.deadline is None else self.deadline, 0, 1e9)

    def draw(self) -> Iterator[tuple[float, Request, float | None]]:
        """When each comes, the request, and when its client leaves, if he does."""
        numbers, now = random.Random(self.seed), 0.0
        size = self.prefix
        heads = [tuple(range(p * size, (p + 1) * size)) for p in range(self.prefixes)]
        for id in range(self.requests):
            if id % self.burst == 0:
                now += numbers.expovariate(self.rate / self.burst)
            length = self._length(numbers, self.prompt)
            head = numbers.choice(heads) if numbers.random() < self.shared else ()
            # The rest is its own: it begins with its number, and keys tell what came before.
            tail = (_OWN + id, *range(1, length))
            leaves = numbers.random() < self.cancelled
            yield (
                now,
                Request(
                    id=id,
                    prompt=head + tail,
                    max_tokens=self._length(numbers, self.output),
                    deadline=None if self.deadline is None else now + self.deadline,
                ),
                now + numbers.expovariate(0.5) if leaves else None,
            )

    def _length(self, numbers: random.Random, mean: int) -> int:
        drawn = numbers.lognormvariate(math.log(mean) - self.spread**2 / 2, self.spread)
        return max(1, min(self.longest, round(drawn)))


def _within(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise ConfigError(f"{name} is {value}", hint=f"give a number from {low:g} to {high:g}")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """What an answer has to keep to be a good one."""

    first: float = 1.0
    """Seconds to the first token."""
    between: float = 0.1
    """Seconds between tokens, on average."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a load. Latencies are percentiles in seconds, of the requests answered."""

    requests: int
    ends: dict[str, int]
    seconds: float
    """From the first arrival to the last end."""
    requests_per_s: float
    goodput_per_s: float
    """Answers that kept the goal."""
    output_tokens: int
    output_tokens_per_s: float
    first_token: dict[str, float]
    between_tokens: dict[str, float]
    total: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Report(Outcome):
    """What came of it by the clock of the simulation, and how the scheduler did."""

    prompt_tokens: int
    hit_rate: float
    """The share of the tokens of requests that started which were found in the cache."""
    preemptions: int
    steps: int
    tokens_per_step: float
    decisions: int
    """A decision is a request's share of a step."""
    decisions_per_s: float
    """In a second that the processor spends in the scheduler."""
    steps_per_s: float
    """In a second that the processor spends in the scheduler."""
    wall_seconds: float


def simulate(
    limits: Limits,
    costs: Costs,
    trace: Trace,
    goal: Goal,
    progress: Callable[[int], object] = lambda ended: None,
) -> Report:
    """Serve the trace; `progress` hears how many more requests have ended.

    >>> report = simulate(Limits(blocks=512), Costs(), Trace(requests=100), Goal())
    >>> report.ends
    {'length': 100}
    """
    simulation = _Simulation(limits, costs, trace, goal)
    return simulation.run(progress)


class _Client:
    """One who asked: when, and when tokens came."""

    __slots__ = ("arrival", "first", "last", "request")

    def __init__(self, arrival: float, request: Request) -> None:
        self.arrival, self.request = arrival, request
        self.first = self.last = math.nan


class _Simulation:
    def __init__(self, limits: Limits, costs: Costs, trace: Trace, goal: Goal) -> None:
        self.costs, self.trace, self.goal = costs, trace, goal
        self.scheduler = Scheduler(limits)
        self.now = 0.0
        self.clients: dict[int, _Client] = {}
        self.leaving: list[tuple[float, int]] = []
        self.ends: Counter[str] = Counter()
        self.first, self.total = array("d"), array("d")
        self.gaps: Counter[int] = Counter()
        self.good = self.prompts = self.cached = self.outputs = 0
        self.preemptions = self.steps = self.decisions = self.computed = 0
        self.planning = 0.0

    def run(self, progress: Callable[[int], object]) -> Report:
        begin = time.perf_counter()
        arrivals = self.trace.draw()
        upcoming, ended = next(arrivals, None), 0
        events: list[Event] = []
        while True:
            while upcoming and upcoming[0] <= self.now:
                self._ask(*upcoming, events)
                upcoming = next(arrivals, None)
            while self.leaving and self.leaving[0][0] <= self.now:
                events.append(End(heappop(self.leaving)[1], Reason.CANCELLED))
            plan = self._plan(events)
            self._note(plan)
            ended += len(plan.ends)
            if ended >= _REPORT:
                progress(ended)
                ended = 0
            if plan.work:
                events = [self._compute(plan)]
            elif upcoming:
                events, self.now = [], max(self.now, upcoming[0])
            else:
                progress(ended)
                return self._report(time.perf_counter() - begin)

    def _ask(
        self, arrival: float, request: Request, leaves: float | None, events: list[Event]
    ) -> None:
        self.clients[request.id] = _Client(arrival, request)
        self.prompts += len(request.prompt)
        events.append(request)
        if leaves is not None:
            heappush(self.leaving, (leaves, request.id))

    def _plan(self, events: list[Event]) -> Plan:
        begin = time.thread_time()  # whoever else uses the machine is not its fault
        plan = self.scheduler.step(self.now, events)
        self.planning += time.thread_time() - begin
        return plan

    def _note(self, plan: Plan) -> None:
        self.preemptions += len(plan.preempted)
        for start in plan.starts:
            self.cached += start.cached
        for end in plan.ends:
            self.ends[end.reason.value] += 1
            client = self.clients.pop(end.id)
            if end.reason is Reason.LENGTH:
                self._answered(client)

    def _answered(self, client: _Client) -> None:
        first, tokens = client.first - client.arrival, client.request.max_tokens
        self.first.append(first)
        self.total.append(client.last - client.arrival)
        between = (client.last - client.first) / max(1, tokens - 1)
        self.good += first <= self.goal.first and between <= self.goal.between

    def _compute(self, plan: Plan) -> Retire:
        """Let the step's time pass."""
        work, before = plan.work, self.now
        tokens, keys, pairs = counted(work)
        self.now = now = before + self.costs.seconds(tokens, keys, pairs)
        self.steps += 1
        self.decisions += len(work)
        self.computed += tokens
        clients, steady = self.clients, 0
        sampled: list[tuple[int, ...]] = []
        for item in work:
            if not item.samples:
                sampled.append(())
                continue
            sampled.append(_SAMPLED)
            client = clients[item.id]
            if client.last == before:
                steady += 1
            elif client.first != client.first:  # the first token
                client.first = now
            else:
                self.gaps[_bucket(now - client.last)] += 1
            client.last = now
        self.outputs += len(work) - sampled.count(())
        if steady:
            self.gaps[_bucket(now - before)] += steady
        return Retire(plan.step, tuple(sampled))

    def _report(self, wall: float) -> Report:
        seconds = max(self.now, 1e-9)
        started = self.cached + self.computed
        return Report(
            requests=self.trace.requests,
            ends=dict(sorted(self.ends.items())),
            seconds=round(seconds, 3),
            requests_per_s=round(len(self.total) / seconds, 3),
            goodput_per_s=round(self.good / seconds, 3),
            prompt_tokens=self.prompts,
            output_tokens=self.outputs,
            output_tokens_per_s=round(self.outputs / seconds, 1),
            first_token=_percentiles(Counter(map(_bucket, self.first))),
            between_tokens=_percentiles(self.gaps),
            total=_percentiles(Counter(map(_bucket, self.total))),
            hit_rate=round(self.cached / max(1, started), 4),
            preemptions=self.preemptions,
            steps=self.steps,
            tokens_per_step=round(self.computed / max(1, self.steps), 2),
            decisions=self.decisions,
            decisions_per_s=round(self.decisions / max(self.planning, 1e-9)),
            steps_per_s=round(self.steps / max(self.planning, 1e-9)),
            wall_seconds=round(wall, 2),
        )


def _bucket(seconds: float) -> int:
    """Durations within one percent are counted together: a million requests have many."""
    return round(100 * math.log(max(seconds, 1e-9)))


def _percentiles(buckets: Counter[int]) -> dict[str, float]:
    """Of what was counted; empty where nothing was.

    >>> _percentiles(Counter({_bucket(0.5): 95, _bucket(2.0): 5}))
    {'p50': 0.5016, 'p90': 0.5016, 'p99': 1.9937}
    """
    found: dict[str, float] = {}
    for percentile in PERCENTILES if buckets else ():
        left = buckets.total() * percentile / 100
        for bucket in sorted(buckets):
            left -= buckets[bucket]
            if left <= 0:
                found[f"p{percentile}"] = round(math.exp(bucket / 100), 4)
                break
    return found
