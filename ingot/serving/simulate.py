"""Simulate a server: the real scheduler, a synthetic workload and a cost model instead of a model.

Only time is simulated: a step takes what the `CostModel` says, and the simulated clock advances by
that. The scheduler's decisions are those of the engine, so queueing, batching, prefix hits,
preemption and rejection are those of a server. Use it to size a deployment or to judge a change of
the scheduler.

A fleet has a scheduler for each replica, and the real router. If a replica fails, its requests are
sent to others at once: those without a first token are retried, the others continue with the tokens
generated so far as a part of their prompt.

By default each replica has a machine to itself, and what is in front of it takes no time. With a
`MachineConfig` they share the cores of one machine with the HTTP process, which handles each
request and the outputs of each step.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any

from msgspec.structs import replace

from ingot.core.config import check_bounds
from ingot.serving.costs import CostModel, count_work
from ingot.serving.engine.request import Abort, FinishReason, Request
from ingot.serving.engine.scheduler import (
    Event,
    Finished,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepDone,
)
from ingot.serving.fleet.router import Router, RouterConfig, RouterPolicy
from ingot.serving.machine import Action, MachineConfig, Process, SharedCores
from ingot.serving.workload import RequestWorkload

PERCENTILES = (50, 90, 99)
_SAMPLED = (0,)
_TIMED_EVERY = 64  # calls of the scheduler, of which one is measured
_PROGRESS_EVERY = 1000  # finished requests between two calls of `progress`


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
    replicas: list[ReplicaReport]
    failover: FailoverReport | None
    """None if no replica failed."""


@dataclass(kw_only=True)
class ReplicaReport:
    """What a replica did."""

    requests: int = 0
    """Requests that it completed."""
    steps: int = 0
    busy_s: float = 0.0
    """Seconds in which it computed steps."""
    computed_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class FailoverReport:
    """What happened to the requests of the replica that failed. Latencies as in `LoadReport`."""

    retried: int
    """Requests without a first token, which were retried on other replicas."""
    continued: int
    """Requests with tokens, which were continued."""
    ttft: dict[str, float]
    """Time to first token of those retried, from their arrival."""
    pause: dict[str, float]
    """Time between two tokens of those continued."""


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


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Replicas that serve the workload."""

    replicas: int = 1
    """Number of replicas; the request rate is that of all together."""
    policy: RouterPolicy = "prefix"
    """How the router chooses a replica."""
    fail_at: float | None = None
    """Seconds after which the replica with the most load fails."""
    restart_s: float = 60.0
    """Seconds after which it is available again, with an empty cache."""

    def __post_init__(self) -> None:
        check_bounds(self, replicas=(1, 10_000), restart_s=(0, 1e9))
        if self.fail_at is not None:
            check_bounds(self, fail_at=(0, 1e9))


def simulate(
    config: SchedulerConfig,
    costs: CostModel,
    workload: RequestWorkload,
    slo: SLO,
    progress: Callable[[int], object] = lambda finished: None,
    fleet: FleetConfig = FleetConfig(),  # noqa: B008
    machine: MachineConfig = MachineConfig(),  # noqa: B008
) -> SimulationReport:
    """Serve the workload; `progress` is called with the number of newly finished requests.

    >>> config, workload = SchedulerConfig(num_blocks=512), RequestWorkload(num_requests=100)
    >>> simulate(config, CostModel(), workload, SLO()).finish_reasons
    {'length': 100}
    """
    return _Simulation(config, costs, workload, slo, fleet, machine).run(progress)


class _SimulatedClient:
    """A request in progress, and when its tokens arrived."""

    __slots__ = ("arrival", "disconnect", "first_token_at", "last_token_at", "moved", "request")

    def __init__(self, arrival: float, request: Request, disconnect: float | None) -> None:
        self.arrival, self.request, self.disconnect = arrival, request, disconnect
        # While it decodes without interruption, the second is its replica's `delivered_at`.
        self.first_token_at = self.last_token_at = math.nan
        self.moved = False  # to another replica, without a token from there yet


class _SimulatedReplica:
    """A scheduler, its step in flight, and the events that wait for the end of that step."""

    def __init__(self, config: SchedulerConfig, stats: ReplicaReport) -> None:
        self.stats = stats
        self.scheduler = Scheduler(config)
        self.events: list[Event] = []
        self.disconnects: list[tuple[float, int]] = []  # a heap
        self.plan: SchedulerOutput | None = None  # in flight
        self.step_began = self.delivered_at = math.nan
        self.prefilling: set[int] = set()  # admitted, without a token since
        self.failed = False


class _StepOutputs:
    """What clients see of a step."""

    __slots__ = ("finished", "num_decoding", "paused", "resumed")

    def __init__(self) -> None:
        self.num_decoding = 0  # requests with a token now, and one in the step before
        self.resumed: Sequence[int] = ()  # with a token now, but none in the step before
        self.paused: Sequence[int] = ()  # with a token now, but none in the next step
        self.finished: Sequence[Finished] = ()


class _Simulation:
    def __init__(
        self,
        config: SchedulerConfig,
        costs: CostModel,
        workload: RequestWorkload,
        slo: SLO,
        fleet: FleetConfig,
        machine: MachineConfig,
    ) -> None:
        self.config, self.costs, self.workload, self.slo = config, costs, workload, slo
        self.fleet, self.machine_config = fleet, machine
        self.machine = SharedCores(machine.cores) if machine.cores else None
        self.has_processes = machine.has_processes
        self.load_generator = Process(self._begin_work, machine.clients.wakeup_s)
        self.server = Process(self._begin_work, machine.server.wakeup_s)
        self.router = Router(config, RouterConfig(policy=fleet.policy))
        self.stats = [ReplicaReport() for _ in range(fleet.replicas)]
        self.replicas: dict[int, _SimulatedReplica] = {}
        self.now = 0.0
        self.timers: list[tuple[float, int, Action]] = []  # a heap
        self.num_timers = 0
        self.clients: dict[int, _SimulatedClient] = {}
        self.unrouted: list[Request] = []  # while all replicas are down
        self.finish_reasons: Counter[str] = Counter()
        self.num_finished = 0
        self.ttft, self.e2e = array("d"), array("d")
        self.itl: Counter[int] = Counter()  # by bucket
        self.num_good = self.prompt_tokens = self.preemptions = self.decisions = 0
        self.scheduler_seconds = 0.0
        self.num_scheduled = 0
        self.num_retried = self.num_continued = 0
        self.retry_ttft, self.pauses = array("d"), array("d")

    def run(self, progress: Callable[[int], object]) -> SimulationReport:
        begin = time.perf_counter()
        arrivals = self.workload.generate()
        upcoming = next(arrivals, None)
        requests: list[Request]
        for index in range(self.fleet.replicas):
            self._start_replica(index)
        if self.fleet.fail_at is not None:
            self._set_timer(self.fleet.fail_at, self._fail_replica)
        while upcoming or self.clients:
            if upcoming and upcoming[0] <= self._next_event():
                self.now, requests = upcoming[0], []
                while upcoming and upcoming[0] <= self.now:
                    requests.append(self._add_client(*upcoming))
                    upcoming = next(arrivals, None)
                self._send_all(requests)
            else:
                self._next_action()()
            if self.num_finished >= _PROGRESS_EVERY:
                progress(self.num_finished)
                self.num_finished = 0
        progress(self.num_finished)
        return self._report(time.perf_counter() - begin)

    def _set_timer(self, at: float, action: Action) -> None:
        self.num_timers += 1
        heappush(self.timers, (at, self.num_timers, action))

    def _begin_work(self, seconds: float, action: Action, *, is_engine: bool = False) -> None:
        """Call `action` after a process has computed for `seconds`."""
        if self.machine is None:
            self._set_timer(self.now + seconds, action)
        else:
            self.machine.begin(self.now, seconds, action, is_engine=is_engine)

    def _next_event(self) -> float:
        """Return the time of the next timer, or of the next end of a work."""
        next_timer = self.timers[0][0] if self.timers else math.inf
        return next_timer if self.machine is None else min(next_timer, self.machine.next_end)

    def _next_action(self) -> Action:
        self.now = self._next_event()
        if self.machine is not None and self.now == self.machine.next_end:
            return self.machine.pop()
        return heappop(self.timers)[2]

    # Requests

    def _add_client(self, arrival: float, request: Request, disconnect: float | None) -> Request:
        self.clients[request.id] = _SimulatedClient(arrival, request, disconnect)
        self.prompt_tokens += len(request.prompt)
        return request

    def _send_all(self, requests: Sequence[Request]) -> None:
        """Send requests through the load generator and the HTTP process, if these take time."""
        if not self.has_processes:
            self._route_all(requests)
            return
        machine = self.machine_config
        for request in requests:
            num_tokens = len(request.prompt)
            route = partial(self._route_all, [request])
            parse = partial(self.server.submit, machine.server.request_seconds(num_tokens), route)
            self.load_generator.submit(machine.clients.request_seconds(num_tokens), parse)

    def _route_all(self, requests: Iterable[Request]) -> None:
        """Send requests to replicas, and start steps on those that were idle."""
        woken: dict[int, _SimulatedReplica] = {}
        for request in requests:
            index = self.router.choose(request)
            if index is None:
                self.unrouted.append(request)
                continue
            replica = self.replicas[index]
            replica.events.append(request)
            disconnect = self.clients[request.id].disconnect
            if disconnect is not None:
                heappush(replica.disconnects, (disconnect, request.id))
            if replica.plan is None and not replica.failed:
                woken[index] = replica
        for replica in woken.values():
            self._start_step(replica)

    # Steps

    def _start_step(
        self, replica: _SimulatedReplica, outputs: _StepOutputs | None = None, num_tokens: int = 0
    ) -> None:
        """Start the next step; send the outputs of the last one, and what the scheduler adds."""
        now, disconnects = self.now, replica.disconnects
        while disconnects and disconnects[0][0] <= now:
            replica.events.append(Abort(heappop(disconnects)[1], FinishReason.CANCELLED))
        plan = self._schedule(replica)
        replica.events = []
        if plan.preempted or plan.finished:
            outputs = outputs or _StepOutputs()
            outputs.paused = [id for id in plan.preempted if id not in replica.prefilling]
            outputs.finished = plan.finished
        if plan.admitted or plan.preempted or plan.finished:
            self._record(replica, plan)
        replica.plan = None
        if plan.scheduled:
            replica.plan, replica.step_began = plan, now
            if replica.prefilling:
                tokens, keys, pairs = count_work(plan.scheduled)
            else:  # one token each
                tokens, pairs = len(plan.scheduled), 0.0
                keys = tokens + sum([seq.start for seq in plan.scheduled])
            replica.stats.computed_tokens += tokens
            counts = len(plan.scheduled), len(plan.admitted)
            seconds = self.costs.step_seconds(tokens, keys, pairs, *counts)
            self._begin_work(seconds, partial(self._end_step, replica), is_engine=True)
        if outputs is not None:
            self._send_outputs(replica, outputs, num_tokens)

    def _schedule(self, replica: _SimulatedReplica) -> SchedulerOutput:
        """Return the next step; measure the CPU time of some: reading that clock takes longer than
        many a step, on some machines."""
        self.num_scheduled += 1
        if self.num_scheduled % _TIMED_EVERY:
            return replica.scheduler.step(self.now, replica.events)
        begin = time.thread_time()  # other processes do not count
        plan = replica.scheduler.step(self.now, replica.events)
        self.scheduler_seconds += _TIMED_EVERY * (time.thread_time() - begin)
        return plan

    def _record(self, replica: _SimulatedReplica, plan: SchedulerOutput) -> None:
        stats, prefilling = replica.stats, replica.prefilling
        self.preemptions += len(plan.preempted)
        prefilling.difference_update(plan.preempted)
        for admitted in plan.admitted:
            prefilling.add(admitted.id)
            stats.cached_tokens += admitted.num_cached_tokens
        for finished in plan.finished:
            prefilling.discard(finished.id)

    def _record_latency(self, client: _SimulatedClient) -> None:
        ttft, tokens = client.first_token_at - client.arrival, client.request.max_tokens
        self.ttft.append(ttft)
        self.e2e.append(self.now - client.arrival)
        tpot = (self.now - client.first_token_at) / max(1, tokens - 1)
        self.num_good += ttft <= self.slo.ttft and tpot <= self.slo.tpot

    def _end_step(self, replica: _SimulatedReplica) -> None:
        """Send the tokens of the step, and begin the next one."""
        plan = replica.plan
        if replica.failed or plan is None:
            return
        outputs, resumed = _StepOutputs(), list[int]()
        scheduled, prefilling = plan.scheduled, replica.prefilling
        num_decoding = num_sampled = len(scheduled)
        sampled = (_SAMPLED,) * num_decoding
        if prefilling:
            sampled = tuple([_SAMPLED if seq.needs_sampling else () for seq in scheduled])
            num_sampled -= sampled.count(())
            for seq in scheduled:
                if seq.id in prefilling:
                    num_decoding -= 1
                    if seq.needs_sampling:
                        prefilling.remove(seq.id)
                        resumed.append(seq.id)
        outputs.num_decoding, outputs.resumed = num_decoding, resumed
        stats = replica.stats
        stats.steps += 1
        stats.busy_s += self.now - replica.step_began
        stats.output_tokens += num_sampled
        self.decisions += len(scheduled)
        replica.events.insert(0, StepDone(plan.step, sampled))
        self._start_step(replica, outputs, num_sampled)

    def _send_outputs(
        self, replica: _SimulatedReplica, outputs: _StepOutputs, num_tokens: int
    ) -> None:
        """Send what a step has computed through the HTTP process and the load generator."""
        if not self.has_processes:
            self._on_outputs(outputs)
            self._deliver(replica, outputs)
            return
        machine = self.machine_config

        def send() -> None:
            self._on_outputs(outputs)
            deliver = partial(self._deliver, replica, outputs)
            self.load_generator.submit(machine.clients.outputs_seconds(num_tokens), deliver)

        self.server.submit(machine.server.outputs_seconds(num_tokens), send)

    def _on_outputs(self, outputs: _StepOutputs) -> None:
        """The HTTP process has the outputs of a step."""
        for id in outputs.resumed:
            self.router.start_decoding(id)
        for finished in outputs.finished:
            self.router.finish(finished.id)

    def _deliver(self, replica: _SimulatedReplica, outputs: _StepOutputs) -> None:
        """The clients have the outputs of a step."""
        if outputs.num_decoding:
            self.itl[_bucket(self.now - replica.delivered_at)] += outputs.num_decoding
        replica.delivered_at = self.now
        for id in outputs.resumed:
            self._resume(self.clients[id])
        for id in outputs.paused:
            self.clients[id].last_token_at = self.now
        for finished in outputs.finished:
            self.finish_reasons[finished.reason.value] += 1
            self.num_finished += 1
            client = self.clients.pop(finished.id)
            if finished.reason is FinishReason.LENGTH:
                replica.stats.requests += 1
                self._record_latency(client)

    def _resume(self, client: _SimulatedClient) -> None:
        """The first token arrived, or the first after an interruption."""
        if math.isnan(client.first_token_at):
            client.first_token_at = self.now
            if client.moved:
                self.retry_ttft.append(self.now - client.arrival)
        else:
            self.itl[_bucket(self.now - client.last_token_at)] += 1
            if client.moved:
                self.pauses.append(self.now - client.last_token_at)
        client.moved = False

    # Replicas

    def _start_replica(self, index: int) -> None:
        self.replicas[index] = _SimulatedReplica(self.config, self.stats[index])
        self.router.add(index)

    def _restart_replica(self, index: int) -> None:
        self._start_replica(index)
        requests, self.unrouted = self.unrouted, []
        self._route_all(requests)

    def _fail_replica(self) -> None:
        """The replica with the most load dies; the HTTP process gets what it has sent before."""
        index = max(self.router.loads, key=self.router.loads.__getitem__)
        replica = self.replicas[index]
        replica.failed = True
        self.server.submit(0.0, partial(self._lose_replica, index))

    def _lose_replica(self, index: int) -> None:
        """Others get the requests of a replica that died, with their tokens."""
        replica = self.replicas.pop(index)
        if replica.plan:
            for seq in replica.plan.scheduled:
                if seq.id not in replica.prefilling:
                    self.clients[seq.id].last_token_at = replica.delivered_at
        requests: list[Request] = []
        for id in self.router.lose(index):
            client = self.clients[id]
            client.moved = True
            tokens = replica.scheduler.tokens(id) or client.request.prompt
            generated = tokens[len(client.request.prompt) :]
            self.num_continued += len(generated) > 0
            self.num_retried += not generated
            requests.append(replace(client.request, generated=generated))
        self._route_all(requests)
        restart = partial(self._restart_replica, index)
        self._set_timer(self.now + self.fleet.restart_s, restart)

    def _report(self, wall: float) -> SimulationReport:
        seconds, stats = max(self.now, 1e-9), self.stats
        cached_tokens = sum(replica.cached_tokens for replica in stats)
        computed_tokens = sum(replica.computed_tokens for replica in stats)
        output_tokens = sum(replica.output_tokens for replica in stats)
        steps = sum(replica.steps for replica in stats)
        return SimulationReport(
            num_requests=self.workload.num_requests,
            finish_reasons=dict(sorted(self.finish_reasons.items())),
            duration_s=round(seconds, 3),
            requests_per_s=round(len(self.e2e) / seconds, 3),
            goodput_per_s=round(self.num_good / seconds, 3),
            prompt_tokens=self.prompt_tokens,
            output_tokens=output_tokens,
            output_tokens_per_s=round(output_tokens / seconds, 1),
            ttft=_bucket_percentiles(map(_bucket, self.ttft)),
            itl=_bucket_percentiles(self.itl),
            e2e=_bucket_percentiles(map(_bucket, self.e2e)),
            hit_rate=round(cached_tokens / max(1, cached_tokens + computed_tokens), 4),
            preemptions=self.preemptions,
            steps=steps,
            tokens_per_step=round(computed_tokens / max(1, steps), 2),
            decisions=self.decisions,
            decisions_per_s=round(self.decisions / max(self.scheduler_seconds, 1e-9)),
            steps_per_s=round(steps / max(self.scheduler_seconds, 1e-9)),
            wall_seconds=round(wall, 2),
            replicas=stats,
            failover=self._report_failover(),
        )

    def _report_failover(self) -> FailoverReport | None:
        if self.fleet.fail_at is None:
            return None
        return FailoverReport(
            retried=self.num_retried,
            continued=self.num_continued,
            ttft=percentiles(self.retry_ttft),
            pause=percentiles(self.pauses),
        )


def _bucket(seconds: float) -> int:
    """Count durations within one percent together: a million requests have many."""
    return round(100 * math.log(max(seconds, 1e-9)))


def _bucket_percentiles(buckets: Iterable[int] | Counter[int]) -> dict[str, float]:
    counts = Counter(buckets)
    return percentiles([math.exp(b / 100) for b in counts], list(counts.values()))
