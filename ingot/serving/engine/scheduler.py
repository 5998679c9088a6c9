"""Scheduler: decides how many tokens of which request the next step computes.

Prefill and decode are not separate phases. A request has tokens (its prompt, and those sampled
so far), of which `num_computed` are in the KV cache; each step distributes one token budget so that
the second number catches up with the first (as in vLLM v1). A long prompt takes several steps; a
cached prefix counts as computed; a preempted request has computed nothing and starts over.

**Order.** A request's rank is `arrival + priority * priority_step_s`, then its arrival number: a
priority is a head start in seconds. The order of two requests never changes, so a waiting request
is only overtaken by those that arrive within the head start, and none starves.

**Preemption.** A request may take what it needs (a place in the batch, blocks) from any request
that ranks after it. So the first in rank makes progress in every step. A preempted request releases
all its blocks and waits in its rank; often they are still cached when it is admitted again.

**A step:**

1. Requests whose last block is full get one more, in rank order.
2. Waiting requests are admitted, in rank order, while budget, places and blocks are left. All
   blocks of a prompt are allocated together. Cached blocks are not computed again, except for the
   last token, whose hidden state is needed to sample the next one.
3. Each request that lacks one token gets it; the rest of the budget goes to the others, in rank
   order, so that long prompts do not delay requests that are decoding. If no request is decoding,
   the budget is four times as large.
4. What is left goes to draft tokens (speculative decoding). They are computed like any others: if
   they are accepted, the step yields several tokens; if not, their KV entries are overwritten. No
   request is preempted for a draft.

**Pure.** `Scheduler.step` reads no clock, uses no random numbers and never blocks: its output is a
function of the `(now, events)` since the start. `record` serializes these, and `replay` reproduces
the outputs from them.

    scheduler = Scheduler(SchedulerConfig(num_blocks=1024))
    output = scheduler.step(now, [request])      # output.scheduled: what the runner has to compute
    output = scheduler.step(now, [StepDone(output.step, tokens)])   # output.finished

One step is in flight at a time. Meanwhile requests may arrive and finish; such calls schedule
nothing. A request that finishes in flight is reported at once, but the step still writes to its
blocks: they are released when it is done.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import TypeAlias

import msgspec

from ingot.core.errors import ConfigError
from ingot.serving.engine.blocks import BlockPool, block_key, root_key
from ingot.serving.engine.request import Abort, FinishReason, Request

# Weights are read and packed once for more tokens: prompts are computed 1.13-1.25x as fast in steps
# of 2,048 tokens as in steps of 512 (two models of 100M parameters, two cores).
PREFILL_ONLY_FACTOR = 4


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler.

    >>> SchedulerConfig(num_blocks=100, block_size=16).capacity
    1600
    """

    num_blocks: int
    """KV-cache blocks: memory / (block_size * bytes per token)."""
    block_size: int = 32
    max_num_batched_tokens: int = 512
    """Token budget of a step with decoding requests: higher is more throughput, lower is a steadier
    inter-token latency."""
    max_num_seqs: int = 64
    """Maximum number of running requests."""
    max_queue: int = 4096
    """Maximum number of waiting requests; further ones are rejected."""
    priority_step_s: float = 10.0
    """Seconds of waiting that compensate for one level of priority; 0 disables priorities."""
    model_version: str = ""
    """Version of the weights; blocks of other versions are not reused."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if not 1 <= value <= 2**31:
                raise ConfigError(f"{name} is {value}", hint="give a number from 1 to 2**31")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens: expected at least max_num_seqs "
                f"({self.max_num_seqs}), got {self.max_num_batched_tokens}",
                hint="raise max_num_batched_tokens or lower max_num_seqs",
            )
        if not (math.isfinite(self.priority_step_s) and self.priority_step_s >= 0):
            raise ConfigError(
                f"priority_step_s is {self.priority_step_s}", hint="give seconds, 0 or more"
            )

    @property
    def prefill_only_budget(self) -> int:
        """Token budget of a step without decoding requests."""
        return PREFILL_ONLY_FACTOR * self.max_num_batched_tokens

    @property
    def capacity(self) -> int:
        """Number of tokens that fit in all blocks."""
        return self.num_blocks * self.block_size


_POSITIVE = ("num_blocks", "block_size", "max_num_batched_tokens", "max_num_seqs", "max_queue")


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """The step in flight is computed: the sampled tokens of each `ScheduledSeq`, in order.

    One that `needs_sampling` has one token, others none; with draft tokens, the accepted ones come
    before it. `tokens` is None for a step that failed: nothing of it counts, and its requests are
    scheduled again unless they are aborted.

    >>> StepDone(3, ((17,), ())).step
    3
    """

    step: int
    tokens: tuple[tuple[int, ...], ...] | None
    drafts: tuple[tuple[int, ...], ...] = ()
    """For each `ScheduledSeq` the draft tokens to verify next; empty without a proposer."""


Event: TypeAlias = Request | Abort | StepDone


class ScheduledSeq(msgspec.Struct, frozen=True, gc=False):
    """The tokens of one request that a step computes.

    >>> ScheduledSeq(7, 30, (11, 12), (4, 0), False).tokens
    (11, 12)
    """

    id: int
    start: int
    """Position of the first token; all before it are computed."""
    tokens: tuple[int, ...]
    block_table: tuple[int, ...]
    """Position p is in block `block_table[p // block_size]`."""
    needs_sampling: bool
    """Whether the sequence ends with these tokens, so that the next one is sampled."""
    num_draft_tokens: int = 0
    """Number of draft tokens at the end; one more token is sampled for each."""


class Admitted(msgspec.Struct, frozen=True, gc=False):
    """A request starts to run, with a cached prefix of `num_cached_tokens`."""

    id: int
    num_cached_tokens: int


class Finished(msgspec.Struct, frozen=True, gc=False):
    """A request finished; it is reported exactly once.

    >>> Finished(7, FinishReason.STOP)
    Finished(id=7, reason=<FinishReason.STOP: 'stop'>)
    """

    id: int
    reason: FinishReason


class SchedulerOutput(msgspec.Struct, frozen=True):
    """What to compute next, and what happened to the requests since the previous output.

    If nothing is scheduled, no `StepDone` is expected.
    """

    step: int
    scheduled: tuple[ScheduledSeq, ...] = ()
    admitted: tuple[Admitted, ...] = ()
    preempted: tuple[int, ...] = ()
    finished: tuple[Finished, ...] = ()


class _RequestState:
    """A request that has not finished, and its progress."""

    __slots__ = (
        "block_table",
        "drafts",
        "finished",
        "id",
        "keys",
        "next_event_at",
        "num_computed",
        "num_sealed",
        "rank_key",
        "request",
        "tokens",
    )

    def __init__(self, request: Request, rank_key: tuple[float, int], parent: bytes) -> None:
        self.request = request
        self.id = request.id
        self.finished = False
        self.rank_key = rank_key  # rank, arrival number
        self.tokens = list(request.tokens)
        self.num_computed = 0
        self.block_table: tuple[int, ...] = ()  # empty while it waits
        self.keys = [parent]  # block b has keys[b + 1]
        self.num_sealed = 0
        self.drafts: tuple[int, ...] = ()
        # The num_computed at which a block fills up or the request finishes; below it, nothing
        # needs checking.
        self.next_event_at = 0

    def hash_blocks(self, count: int, size: int) -> None:
        """Compute the keys of the first `count` blocks."""
        for b in range(len(self.keys) - 1, count):
            self.keys.append(block_key(self.keys[b], self.tokens[b * size : (b + 1) * size]))


_by_rank = attrgetter("rank_key")


class Scheduler:
    """Continuous batching with chunked prefill, prefix caching and preemption.

    >>> limits = {"max_num_batched_tokens": 1, "max_num_seqs": 1}
    >>> scheduler = Scheduler(SchedulerConfig(num_blocks=8, block_size=4, **limits))
    >>> output = scheduler.step(0.0, [Request(id=1, prompt=(5, 6, 7, 8, 9), max_tokens=2)])
    >>> output.scheduled[0].tokens, output.scheduled[0].needs_sampling
    ((5, 6, 7, 8), False)
    >>> output = scheduler.step(0.1, [StepDone(output.step, ((),))])
    >>> output.scheduled[0].tokens, output.scheduled[0].needs_sampling
    ((9,), True)
    >>> output = scheduler.step(0.2, [StepDone(output.step, ((40,),))])
    >>> scheduler.step(0.3, [StepDone(output.step, ((41,),))]).finished
    (Finished(id=1, reason=<FinishReason.LENGTH: 'length'>),)
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.now = -math.inf
        self._states: dict[int, _RequestState] = {}
        self._running: list[_RequestState] = []  # these two in rank order
        self._waiting: list[_RequestState] = []
        self._deadlines: list[tuple[float, int, int]] = []  # a heap; may hold finished requests
        self._arrivals = 0
        self._step = 0
        self._in_flight: list[_RequestState] = []
        self._num_scheduled: list[int] = []  # tokens of each request in flight, without drafts
        self._drafts_in_flight: Sequence[tuple[int, ...]] = ()
        self._has_drafts = False
        self._needs_block: list[_RequestState] = []  # requests with more tokens than slots
        self._admitted: list[Admitted] = []
        self._preempted: list[int] = []
        self._finished: list[Finished] = []

    @property
    def num_running(self) -> int:
        """Number of requests that have blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for blocks."""
        return len(self._waiting)

    def tokens(self, id: int) -> tuple[int, ...] | None:
        """Return prompt and sampled tokens of a request; None if it is not known, or finished."""
        state = self._states.get(id)
        return tuple(state.tokens) if state else None

    def step(self, now: float, events: Iterable[Event] = ()) -> SchedulerOutput:
        """Process the events since the last call; schedule a step if none is in flight."""
        if not self.now <= now < math.inf:
            raise ValueError(f"the clock went from {self.now} to {now}")
        self.now = now
        for event in events:
            if isinstance(event, StepDone):
                self._complete_step(event)
            elif isinstance(event, Request):
                self._add_request(event)
            elif state := self._states.get(event.id):
                self._finish(state, event.reason)
        self._expire_deadlines()
        scheduled: list[ScheduledSeq] = []
        if not self._in_flight:
            if self._needs_block:
                self._grow_block_tables()
            self._admit()
            scheduled = self._schedule_tokens()
        if not (self._admitted or self._preempted or self._finished):
            return SchedulerOutput(self._step, tuple(scheduled))
        output = SchedulerOutput(
            self._step,
            tuple(scheduled),
            tuple(self._admitted),
            tuple(self._preempted),
            tuple(self._finished),
        )
        self._admitted, self._preempted, self._finished = [], [], []
        return output

    # Events

    def _add_request(self, request: Request) -> None:
        if request.id in self._states:
            raise ValueError(f"duplicate request id {request.id}")
        config = self.config
        if request.max_len > config.capacity or len(self._waiting) >= config.max_queue:
            self._finished.append(Finished(request.id, FinishReason.REJECTED))
            return
        rank_key = (self.now + request.priority * config.priority_step_s, self._arrivals)
        self._arrivals += 1
        parent = root_key(request.adapter, config.model_version, request.cache_salt)
        state = _RequestState(request, rank_key, parent)
        self._states[request.id] = state
        insort(self._waiting, state, key=_by_rank)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, rank_key[1], request.id))

    def _complete_step(self, event: StepDone) -> None:
        in_flight, self._in_flight = self._in_flight, []
        drafts_in_flight, self._drafts_in_flight = self._drafts_in_flight, ()
        if event.step != self._step or not in_flight:
            raise ValueError(f"step {event.step} is not in flight")
        new_tokens, counts = event.tokens, self._num_scheduled
        if new_tokens is None:
            new_tokens, counts = ((),) * len(in_flight), [0] * len(in_flight)
        if not drafts_in_flight:
            drafts_in_flight = ((),) * len(in_flight)
        for state, count, new, draft in zip(
            in_flight, counts, new_tokens, drafts_in_flight, strict=True
        ):
            if state.finished:  # while in flight
                self.pool.release(state.block_table)
                continue
            num_computed, tokens = state.num_computed + count, state.tokens
            if (num_computed == len(tokens)) != bool(new):
                raise ValueError(f"request {state.id}: unexpected tokens {new}")
            tokens += new
            if len(new) > 1:
                if new[:-1] != draft[: len(new) - 1]:
                    raise ValueError(f"request {state.id}: tokens {new} for drafts {draft}")
                num_computed += len(new) - 1
            state.num_computed = num_computed
            if num_computed >= state.next_event_at:
                self._on_block_boundary(state)
        for state, drafts in zip(in_flight, event.drafts, strict=bool(event.drafts)):
            state.drafts = drafts
        self._has_drafts = any(event.drafts)

    def _on_block_boundary(self, state: _RequestState) -> None:
        """Seal full blocks; finish the request if it has all its tokens."""
        size = self.config.block_size
        num_full = state.num_computed // size
        state.hash_blocks(num_full, size)
        for b in range(state.num_sealed, num_full):
            self.pool.seal(state.block_table[b], state.keys[b + 1])
        state.num_sealed = num_full
        if len(state.tokens) >= state.request.max_len:
            self._finish(state, FinishReason.LENGTH)
            return
        if len(state.tokens) > len(state.block_table) * size:
            self._needs_block.append(state)
        self._set_next_event(state)

    def _set_next_event(self, state: _RequestState) -> None:
        """A new block is needed only when the last one is full, which is an event already."""
        next_block = (state.num_sealed + 1) * self.config.block_size
        state.next_event_at = min(next_block, state.request.max_len - 1)

    def _expire_deadlines(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self.now:
            _, arrival, id = heappop(self._deadlines)
            state = self._states.get(id)
            if state and state.rank_key[1] == arrival:
                self._finish(state, FinishReason.DEADLINE)

    def _finish(self, state: _RequestState, reason: FinishReason) -> None:
        del self._states[state.id]
        state.finished = True
        self._finished.append(Finished(state.id, reason))
        queue = self._running if state.block_table else self._waiting
        del queue[bisect_left(queue, state.rank_key, key=_by_rank)]
        if state not in self._in_flight:
            self.pool.release(state.block_table)

    # Scheduling

    def _grow_block_tables(self) -> None:
        size = self.config.block_size
        for state in sorted(self._needs_block, key=_by_rank):
            # A request that finished, or was preempted in this loop, has no block table any more.
            while state.block_table and not state.finished:
                count = -(-len(state.tokens) // size) - len(state.block_table)
                blocks = self.pool.allocate(count)
                if blocks is not None:
                    state.block_table += blocks
                    break
                self._preempt_last()
        self._needs_block = []

    def _preempt_last(self) -> None:
        state = self._running.pop()
        self.pool.release(state.block_table)
        state.block_table = state.drafts = ()
        insort(self._waiting, state, key=_by_rank)
        self._preempted.append(state.id)

    def _admit(self) -> None:
        while self._waiting and self._try_admit(self._waiting[0]):
            del self._waiting[0]

    def _try_admit(self, state: _RequestState) -> bool:
        """Give it a place and blocks, free ones or those of requests that rank after it; return
        False if they do not suffice, or if the requests before it need the whole budget."""
        running, pool, config = self._running, self.pool, self.config
        ahead = bisect_left(running, state.rank_key, key=_by_rank)
        if ahead == config.max_num_seqs:
            return False
        if sum([len(o.tokens) - o.num_computed for o in running[:ahead]]) >= self._budget():
            return False
        size, tokens = config.block_size, len(state.tokens)
        max_cached = (tokens - 1) // size
        if state.request.max_cached_tokens is not None:
            max_cached = min(max_cached, state.request.max_cached_tokens // size)
        state.hash_blocks(max_cached, size)
        cached = pool.find_cached(state.keys[1 : max_cached + 1])
        count = -(-tokens // size) - len(cached)
        # An upper bound of what preemption can free; shared and cached blocks only show on trying.
        if pool.num_free + sum([len(o.block_table) for o in running[ahead:]]) < count:
            return False
        while True:
            has_place = len(running) < config.max_num_seqs
            block_table = pool.allocate(count, cached) if has_place else None
            if block_table is not None:
                break
            if len(running) == ahead:
                return False
            self._preempt_last()
        state.block_table = block_table
        state.num_sealed = len(cached)
        state.num_computed = len(cached) * size
        self._set_next_event(state)
        running.insert(ahead, state)
        self._admitted.append(Admitted(state.id, state.num_computed))
        return True

    def _budget(self) -> int:
        decoding = any(len(state.tokens) - state.num_computed == 1 for state in self._running)
        return self.config.max_num_batched_tokens if decoding else self.config.prefill_only_budget

    def _schedule_tokens(self) -> list[ScheduledSeq]:
        if not self._running:
            return []
        self._step += 1
        in_flight = [s for s in self._running if len(s.tokens) - s.num_computed == 1]
        scheduled = [
            ScheduledSeq(s.id, s.num_computed, (s.tokens[-1],), s.block_table, True)
            for s in in_flight
        ]
        config = self.config
        budget = config.max_num_batched_tokens if in_flight else config.prefill_only_budget
        counts, left = [1] * len(scheduled), budget - len(scheduled)
        if len(in_flight) < len(self._running):
            for state in self._running:
                start, end = state.num_computed, len(state.tokens)
                if end - start == 1 or not left:
                    continue
                tokens = tuple(state.tokens[start : start + left])
                last = start + len(tokens) == end
                scheduled.append(ScheduledSeq(state.id, start, tokens, state.block_table, last))
                in_flight.append(state)
                counts.append(len(tokens))
                left -= len(tokens)
        if self._has_drafts and left:
            self._drafts_in_flight = self._add_drafts(in_flight, scheduled, left)
        self._in_flight, self._num_scheduled = in_flight, counts
        return scheduled

    def _add_drafts(
        self, in_flight: list[_RequestState], scheduled: list[ScheduledSeq], left: int
    ) -> list[tuple[int, ...]]:
        """Append draft tokens to the requests that sample, as far as budget and blocks allow."""
        size = self.config.block_size
        all_drafts: list[tuple[int, ...]] = [()] * len(scheduled)
        for index, state in enumerate(in_flight):
            known, seq = len(state.tokens), scheduled[index]
            drafts = state.drafts[: min(left, state.request.max_len - known - 1)]
            if not drafts:
                continue
            count = -(-(known + len(drafts)) // size) - len(state.block_table)
            count = max(0, min(count, self.pool.num_free))
            state.block_table += self.pool.allocate(count) or ()
            all_drafts[index] = drafts = drafts[: len(state.block_table) * size - known]
            tokens, num_drafts = seq.tokens + drafts, len(drafts)
            scheduled[index] = ScheduledSeq(
                state.id, seq.start, tokens, state.block_table, True, num_drafts
            )
            left -= num_drafts
        return all_drafts


def record(now: float, events: Sequence[Event]) -> bytes:
    """Return a log line: the arguments of one call of `step`.

    >>> record(0.5, [Abort(3, FinishReason.CANCELLED)])
    b'[0.5,[{"type":"Abort","id":3,"reason":"cancelled"}]]\\n'
    """
    return msgspec.json.encode((now, events)) + b"\n"


def replay(config: SchedulerConfig, log: Iterable[bytes]) -> Iterator[SchedulerOutput]:
    """Reproduce the scheduler's outputs from its log.

    >>> lines = [record(0.0, [Request(id=1, prompt=(5,), max_tokens=1)])]
    >>> [output.scheduled[0].tokens for output in replay(SchedulerConfig(num_blocks=1), lines)]
    [(5,)]
    """
    scheduler = Scheduler(config)
    for line in log:
        now, events = msgspec.json.decode(line, type=tuple[float, list[Event]])
        yield scheduler.step(now, events)
