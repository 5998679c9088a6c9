"""Who computes how many tokens in the next step.

There is no prefill and no decode. A request has tokens (its prompt, and what was sampled) and
knows how many of them are computed; each step spends one budget of tokens on letting the second
chase the first. A long prompt takes several steps; a prefix found in the cache is computed
already; a preempted request has computed nothing, and begins again.

**One order.** A request's rank is `arrival + priority * patience`, then its number: a priority is
a head start in seconds. The order of two requests never changes, so whoever waits is overtaken
only by those that come within the head start; nobody starves.

**One rule.** A request may take what it needs (a place, blocks) from any that is ranked behind it.
So the first in rank computes something in every step, whatever else happens. Who is preempted
gives all its blocks back and waits in its rank; what it computed is often still cached when its
turn comes.

**A step:**

1. Requests whose last block is full get one more, in rank order.
2. Waiting requests start, in rank order, while budget, places and blocks are left. All of a
   prompt's blocks are allocated together. Those found in the cache are not computed, but for the
   last token, whose state has to be known to sample the next.
3. Each request that lacks one token gets it; what is left of the budget goes to the others, in
   rank order. So long prompts do not hold up those who are being answered. Where nobody lacks just
   one, nobody is held up, and the budget is four times as large.
4. What is then left goes to drafts: tokens that somebody guesses will be sampled next. They are
   computed like any others. If the guess was right, the step brings several tokens; if not, what it
   computed of them is written over. Nobody is preempted for a draft.

**Pure.** `Scheduler.step` reads no clock, draws no number and waits for nothing: plans are a
function of `(now, events)` since the start. `record` writes those down, and `replay` makes the
same plans of them.

    scheduler = Scheduler(Limits(blocks=1024))
    plan = scheduler.step(now, [request])             # plan.work: what the runner is to compute
    plan = scheduler.step(now, [Retire(plan.step, tokens)])   # plan.ends: who is done

One step is in flight at a time. Meanwhile requests may come and end; those calls plan no work.
A request that ends in flight is over at once for its client, but the step still writes to its
blocks: they come back when it retires.
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
from ingot.serving.engine.blocks import BlockPool, key, root
from ingot.serving.engine.request import End, Reason, Request

# Weights are read and packed once for so many more tokens: prompts are computed 1.13-1.25 times as
# fast in steps of 2,048 as in steps of 512 (two models of 100M parameters, two cores).
BURST = 4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the scheduler may spend.

    >>> Limits(blocks=100, block_size=16).capacity
    1600
    """

    blocks: int
    """Blocks of keys and values: memory / (block_size * bytes of a token)."""
    block_size: int = 32
    budget: int = 512
    """Tokens of a step that streams wait for: more is more throughput, less is steadier streams."""
    max_running: int = 64
    max_waiting: int = 4096
    """Beyond, requests are refused."""
    patience: float = 10.0
    """Seconds of waiting that make up for one level of priority; 0 for no priorities."""
    weights: str = ""
    """The version of the weights; blocks of others are not reused."""

    def __post_init__(self) -> None:
        for name in ("blocks", "block_size", "budget", "max_running", "max_waiting"):
            value = getattr(self, name)
            if not 1 <= value <= 2**31:
                raise ConfigError(f"{name} is {value}", hint="give a number from 1 to 2**31")
        if self.budget < self.max_running:
            raise ConfigError(
                f"a budget of {self.budget} tokens for {self.max_running} running requests",
                hint="give at least one token for each: raise budget or lower max_running",
            )
        if not (math.isfinite(self.patience) and self.patience >= 0):
            raise ConfigError(f"patience is {self.patience}", hint="give seconds, 0 or more")

    @property
    def burst(self) -> int:
        """The tokens of a step that no stream waits for: all are at the beginning of their work."""
        return BURST * self.budget

    @property
    def capacity(self) -> int:
        """The tokens that fit in all blocks."""
        return self.blocks * self.block_size


class Retire(msgspec.Struct, frozen=True, tag=True):
    """The step in flight is computed: for each of its works the tokens sampled, in order.

    A work that `samples` has one token, the others have none; one with drafts has, before it, those
    drafts that were right. `tokens` is None for a step that failed: nothing of it counts, and its
    requests are planned again unless they are ended.

    >>> Retire(3, ((17,), ())).step
    3
    """

    step: int
    tokens: tuple[tuple[int, ...], ...] | None
    drafts: tuple[tuple[int, ...], ...] = ()
    """For each work the tokens that may follow those; none at all if nobody guesses."""


Event: TypeAlias = Request | End | Retire


class Work(msgspec.Struct, frozen=True, gc=False):
    """A request's share of a step.

    >>> Work(7, 30, (11, 12), (4, 0), False).tokens
    (11, 12)
    """

    id: int
    start: int
    """The position of the first token; all before it are computed."""
    tokens: tuple[int, ...]
    table: tuple[int, ...]
    """Its blocks: position p is in block `table[p // block_size]`."""
    samples: bool
    """The last token is the sequence's last so far: the next one is to be sampled."""
    drafts: int = 0
    """So many tokens at the end are guesses: the next one is to be sampled for each, too."""


class Start(msgspec.Struct, frozen=True, gc=False):
    """A request starts to run, with so many tokens found in the cache."""

    id: int
    cached: int


class Plan(msgspec.Struct, frozen=True):
    """What to compute next, and what has become of the requests since the plan before.

    Nothing to compute: no work, and nothing to retire.
    """

    step: int
    work: tuple[Work, ...] = ()
    starts: tuple[Start, ...] = ()
    preempted: tuple[int, ...] = ()
    ends: tuple[End, ...] = ()


class _Live:
    """A request that has not ended, and how far it is."""

    __slots__ = (
        "computed",
        "drafts",
        "ended",
        "full",
        "id",
        "keys",
        "place",
        "request",
        "table",
        "tokens",
        "turn",
    )

    def __init__(self, request: Request, place: tuple[float, int], parent: bytes) -> None:
        self.request = request
        self.id = request.id
        self.ended = False
        self.place = place  # its rank, and the number of its arrival
        self.tokens = list(request.prompt)
        self.computed = 0
        self.table: tuple[int, ...] = ()  # empty while it waits
        self.keys = [parent]  # that of block b is keys[b + 1]
        self.full = 0  # blocks that are sealed
        self.drafts: tuple[int, ...] = ()
        self.turn = 0  # when so many are computed, there is more to do than to go on

    def hash_blocks(self, count: int, size: int) -> None:
        """Know the keys of its first blocks."""
        for b in range(len(self.keys) - 1, count):
            self.keys.append(key(self.keys[b], self.tokens[b * size : (b + 1) * size]))


_by_place = attrgetter("place")


class Scheduler:
    """The state between steps.

    >>> scheduler = Scheduler(Limits(blocks=8, block_size=4, budget=1, max_running=1))
    >>> plan = scheduler.step(0.0, [Request(id=1, prompt=(5, 6, 7, 8, 9), max_tokens=2)])
    >>> plan.work
    (Work(id=1, start=0, tokens=(5, 6, 7, 8), table=(0, 1), samples=False, drafts=0),)
    >>> plan = scheduler.step(0.1, [Retire(plan.step, ((),))])
    >>> plan.work
    (Work(id=1, start=4, tokens=(9,), table=(0, 1), samples=True, drafts=0),)
    >>> plan = scheduler.step(0.2, [Retire(plan.step, ((40,),))])
    >>> scheduler.step(0.3, [Retire(plan.step, ((41,),))]).ends
    (End(id=1, reason=<Reason.LENGTH: 'length'>),)
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.blocks)
        self.now = -math.inf
        self._live: dict[int, _Live] = {}
        self._running: list[_Live] = []  # these two in rank order
        self._waiting: list[_Live] = []
        self._deadlines: list[tuple[float, int, int]] = []  # a heap, with some that have ended
        self._arrivals = 0
        self._step = 0
        self._flight: list[_Live] = []
        self._shares: list[int] = []  # how many tokens each in flight computes
        self._guesses: Sequence[tuple[int, ...]] = ()  # which drafts, if any
        self._drafted = False  # somebody has drafts
        self._grow: list[_Live] = []  # those that have more tokens than room
        self._starts: list[Start] = []
        self._preempted: list[int] = []
        self._ends: list[End] = []

    @property
    def running(self) -> int:
        """How many requests have blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """How many requests wait for them."""
        return len(self._waiting)

    def step(self, now: float, events: Iterable[Event] = ()) -> Plan:
        """Take what happened since the last call, and plan the next step if none is in flight."""
        if not self.now <= now < math.inf:
            raise ValueError(f"the clock went from {self.now} to {now}")
        self.now = now
        for event in events:
            if isinstance(event, Retire):
                self._retire(event)
            elif isinstance(event, Request):
                self._arrive(event)
            elif live := self._live.get(event.id):
                self._end(live, event.reason)
        self._expire()
        work: list[Work] = []
        if not self._flight:
            self._give_room()
            self._admit()
            work = self._share()
        plan = Plan(
            self._step,
            tuple(work),
            tuple(self._starts),
            tuple(self._preempted),
            tuple(self._ends),
        )
        self._starts, self._preempted, self._ends = [], [], []
        return plan

    # What happened

    def _arrive(self, request: Request) -> None:
        if request.id in self._live:
            raise ValueError(f"there is a request {request.id} already")
        limits = self.limits
        if request.total > limits.capacity or len(self._waiting) >= limits.max_waiting:
            self._ends.append(End(request.id, Reason.REFUSED))
            return
        place = (self.now + request.priority * limits.patience, self._arrivals)
        self._arrivals += 1
        live = _Live(request, place, root(request.adapter, limits.weights, request.salt))
        self._live[request.id] = live
        insort(self._waiting, live, key=_by_place)
        if request.deadline is not None:
            heappush(self._deadlines, (request.deadline, place[1], request.id))

    def _retire(self, event: Retire) -> None:
        flight, self._flight = self._flight, []
        guesses, self._guesses = self._guesses, ()
        if event.step != self._step or not flight:
            raise ValueError(f"step {event.step} is not in flight")
        new_tokens, shares = event.tokens, self._shares
        if new_tokens is None:
            new_tokens, shares = ((),) * len(flight), [0] * len(flight)
        if not guesses:
            guesses = ((),) * len(flight)
        for live, count, new, guess in zip(flight, shares, new_tokens, guesses, strict=True):
            if live.ended:  # in flight
                self.pool.release(live.table)
                continue
            live.computed += count
            if bool(new) != (live.computed == len(live.tokens)):
                raise ValueError(f"tokens {new} for request {live.id}, not as planned")
            live.tokens += new
            if len(new) > 1:
                if new[:-1] != guess[: len(new) - 1]:
                    raise ValueError(f"tokens {new} for request {live.id} with drafts {guess}")
                live.computed += len(new) - 1
            if live.computed >= live.turn:
                self._turn(live)
        for live, drafts in zip(flight, event.drafts, strict=bool(event.drafts)):
            live.drafts = drafts
        self._drafted = any(event.drafts)

    def _turn(self, live: _Live) -> None:
        """A block is full, or it has all its tokens."""
        size = self.limits.block_size
        full = live.computed // size
        live.hash_blocks(full, size)
        for b in range(live.full, full):
            self.pool.seal(live.table[b], live.keys[b + 1])
        live.full = full
        if len(live.tokens) >= live.request.total:
            self._end(live, Reason.LENGTH)
            return
        if len(live.tokens) > len(live.table) * size:
            self._grow.append(live)
        self._set_turn(live)

    def _set_turn(self, live: _Live) -> None:
        """A new block is needed only when the last one is full, so that is no case of its own."""
        live.turn = min((live.full + 1) * self.limits.block_size, live.request.total - 1)

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self.now:
            _, number, id = heappop(self._deadlines)
            live = self._live.get(id)
            if live and live.place[1] == number:
                self._end(live, Reason.DEADLINE)

    def _end(self, live: _Live, reason: Reason) -> None:
        del self._live[live.id]
        live.ended = True
        self._ends.append(End(live.id, reason))
        queue = self._running if live.table else self._waiting
        del queue[bisect_left(queue, live.place, key=_by_place)]
        if live not in self._flight:
            self.pool.release(live.table)

    # What is next

    def _give_room(self) -> None:
        size = self.limits.block_size
        for live in sorted(self._grow, key=_by_place):
            # One that has ended or was preempted just now has no place any more.
            while live.table and not live.ended:
                count = -(-len(live.tokens) // size) - len(live.table)
                blocks = self.pool.allocate(count)
                if blocks is not None:
                    live.table += blocks
                    break
                self._preempt_last()
        self._grow = []

    def _preempt_last(self) -> None:
        live = self._running.pop()
        self.pool.release(live.table)
        live.table = live.drafts = ()
        insort(self._waiting, live, key=_by_place)
        self._preempted.append(live.id)

    def _admit(self) -> None:
        while self._waiting and self._start(self._waiting[0]):
            del self._waiting[0]

    def _start(self, live: _Live) -> bool:
        """Give it a place and blocks, free ones or of those ranked behind; False if they do not
        suffice, or if those ahead need the whole budget."""
        running, pool, limits = self._running, self.pool, self.limits
        ahead = bisect_left(running, live.place, key=_by_place)
        if ahead == limits.max_running:
            return False
        if sum([len(o.tokens) - o.computed for o in running[:ahead]]) >= self._budget():
            return False
        size, tokens = limits.block_size, len(live.tokens)
        live.hash_blocks((tokens - 1) // size, size)
        found = pool.find(live.keys[1 : (tokens - 1) // size + 1])
        count = -(-tokens // size) - len(found)
        # At most so many can come free; that some are shared, or found, is seen when it is tried.
        if pool.free + sum([len(o.table) for o in running[ahead:]]) < count:
            return False
        while True:
            has_place = len(running) < limits.max_running
            table = pool.allocate(count, found) if has_place else None
            if table is not None:
                break
            if len(running) == ahead:
                return False
            self._preempt_last()
        live.table = table
        live.full = len(found)
        live.computed = len(found) * size
        self._set_turn(live)
        running.insert(ahead, live)
        self._starts.append(Start(live.id, live.computed))
        return True

    def _budget(self) -> int:
        streams = any(len(live.tokens) - live.computed == 1 for live in self._running)
        return self.limits.budget if streams else self.limits.burst

    def _share(self) -> list[Work]:
        if not self._running:
            return []
        self._step += 1
        flight = [live for live in self._running if len(live.tokens) - live.computed == 1]
        work = [
            Work(live.id, live.computed, (live.tokens[-1],), live.table, True) for live in flight
        ]
        shares, left = [1] * len(work), self._budget() - len(work)
        if len(flight) < len(self._running):
            for live in self._running:
                start, end = live.computed, len(live.tokens)
                if end - start == 1 or not left:
                    continue
                tokens = tuple(live.tokens[start : start + left])
                samples = start + len(tokens) == end
                work.append(Work(live.id, start, tokens, live.table, samples))
                flight.append(live)
                shares.append(len(tokens))
                left -= len(tokens)
        if self._drafted and left:
            self._guesses = self._add_drafts(flight, work, left)
        self._flight, self._shares = flight, shares
        return work

    def _add_drafts(
        self, flight: list[_Live], work: list[Work], left: int
    ) -> list[tuple[int, ...]]:
        """Let those who are to be sampled compute what may follow, where there is room for it."""
        size = self.limits.block_size
        guesses: list[tuple[int, ...]] = [()] * len(work)
        for index, live in enumerate(flight):
            known, item = len(live.tokens), work[index]
            drafts = live.drafts[: min(left, live.request.total - known - 1)]
            if not drafts:
                continue
            count = -(-(known + len(drafts)) // size) - len(live.table)
            live.table += self.pool.allocate(max(0, min(count, self.pool.free))) or ()
            guesses[index] = drafts = drafts[: len(live.table) * size - known]
            tokens = item.tokens + drafts
            work[index] = Work(live.id, item.start, tokens, live.table, True, len(drafts))
            left -= len(drafts)
        return guesses


def record(now: float, events: Sequence[Event]) -> bytes:
    """A line of the log: what `step` was called with.

    >>> record(0.5, [End(3, Reason.CANCELLED)])
    b'[0.5,[{"type":"End","id":3,"reason":"cancelled"}]]\\n'
    """
    return msgspec.json.encode((now, events)) + b"\n"


def replay(limits: Limits, log: Iterable[bytes]) -> Iterator[Plan]:
    """The plans that these lines led to.

    >>> lines = [record(0.0, [Request(id=1, prompt=(5,), max_tokens=1)])]
    >>> [plan.work[0].tokens for plan in replay(Limits(blocks=1), lines)]
    [(5,)]
    """
    scheduler = Scheduler(limits)
    for line in log:
        now, events = msgspec.json.decode(line, type=tuple[float, list[Event]])
        yield scheduler.step(now, events)
