"""Strange lives of a scheduler, and all that has to be true in each of their steps.

The machine keeps books of its own: which tokens each request has, and, for every slot of every
block, what was written there last. A slot holds the whole sequence up to its token, with the
tenant and the adapter, as keys and values do. So if a plan ever reads a slot that holds anything
but what the request itself would have computed, that is found, whatever the reason.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ingot.serving.engine import scheduler as real
from ingot.serving.engine.request import Abort, FinishReason, Request

IDS = 6  # few, so that they come again
LONGEST = 16
BOOKS = ("00000000", "01010101")  # prompts begin with one of them, so that many share


@dataclass
class Book:
    """What is known of a request from outside."""

    request: Request
    place: tuple[float, int]
    tokens: list[int] = field(default_factory=list)
    drafts: tuple[int, ...] = ()
    computed: int | None = None  # None: it has to start first

    def content(self, position: int, drafts: tuple[int, ...] = ()) -> tuple[Any, ...]:
        request, tokens = self.request, (*self.tokens, *drafts)
        return (request.cache_salt, request.adapter, *tokens[: position + 1])


class Machine(RuleBasedStateMachine):
    module: ModuleType = real
    sound = False  # begun, and nothing found

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        number = st.integers
        running, size = data.draw(number(1, 4)), data.draw(number(1, 4))
        self.config = self.module.SchedulerConfig(
            # About as many as the longest request needs, so that there are hardly ever enough.
            num_blocks=LONGEST // size + data.draw(number(-1, 2)),
            block_size=size,
            max_num_seqs=running,
            max_num_batched_tokens=running + data.draw(number(0, 6)),
            max_queue=data.draw(number(1, 5)),
            priority_step_s=data.draw(st.sampled_from([0.0, 1.0, 4.0])),
        )
        self.scheduler = self.module.Scheduler(self.config)
        self.now = 0.0
        self.arrivals = 0
        self.live: dict[int, Book] = {}
        self.events: list[Any] = []
        self.flight: tuple[Any, ...] = ()  # works, each with the book it belongs to
        self.memory: dict[tuple[int, int], tuple[Any, ...]] = {}
        self.log: list[bytes] = []
        self.plans: list[Any] = []
        self.step = 0
        self.sound = True

    # What may happen

    @rule(
        prompt=st.tuples(st.sampled_from(BOOKS), st.sampled_from([1, 2, 5, 7, 8])),
        max_tokens=st.integers(1, LONGEST // 2),
        priority=st.sampled_from([0, 0, -2, 2]),
        wait=st.sampled_from([None] * 4 + [0.0, 1.0, 6.0]),
        cache_salt=st.sampled_from([b"", b"", b"x"]),
        adapter=st.sampled_from(["", "", "x"]),
        copies=st.integers(1, 3),
    )
    def arrive(
        self, wait: float | None, prompt: tuple[str, int], copies: int, **options: Any
    ) -> None:
        queued = {getattr(event, "id", None) for event in self.events}
        for id in [id for id in range(IDS) if id not in self.live and id not in queued][:copies]:
            text, length = prompt
            tokens = tuple(map(int, text[: length - id % 2 or 1]))
            deadline = None if wait is None else self.now + wait
            self.events.append(Request(id=id, prompt=tokens, deadline=deadline, **options))

    @rule(
        id=st.integers(0, 2 * IDS),
        reason=st.sampled_from([FinishReason.CANCELLED, FinishReason.STOP, FinishReason.FAILED]),
    )
    def abort(self, id: int, reason: FinishReason) -> None:
        """Of one that may not live, too: its client cannot know yet."""
        self.events.append(Abort(id, reason))

    @rule(
        elapsed=st.sampled_from([0.0, 0.25, 0.25, 1.0]),
        retired=st.sampled_from([True, True, True, False]),
        failed=st.sampled_from([False] * 7 + [True]),
        first=st.booleans(),
        token=st.sampled_from([0, 0, 0, 1]),
        drafts=st.sampled_from([(), (), (0,), (0, 1, 0, 0)]),
        right=st.sampled_from([1, 4, 0]),
        times=st.integers(1, 4),
    )
    def call(
        self,
        elapsed: float,
        retired: bool,
        failed: bool,
        first: bool,
        token: int,
        drafts: tuple[int, ...],
        right: int,
        times: int,
    ) -> None:
        for _ in range(times):
            self.now += elapsed
            if self.flight and retired:
                event = self.module.StepDone(self.step, None)
                if not failed:
                    event = self.retirement(token, drafts, right)
                self.events.insert(0 if first else len(self.events), event)
            self.submit()

    def retirement(self, token: int, drafts: tuple[int, ...], right: int) -> Any:
        """Report the number of accepted drafts, if there were any, and propose the next ones."""
        new: list[tuple[int, ...]] = []
        for work, _ in self.flight:
            guesses = work.tokens[len(work.tokens) - work.num_draft_tokens :]
            new.append((*guesses[:right], token) if work.needs_sampling else ())
        given = tuple(drafts if tokens else () for tokens in new)
        return self.module.StepDone(self.step, tuple(new), given if drafts else ())

    def teardown(self) -> None:
        """Every request finishes, and no block stays in use."""
        if not self.sound:
            return
        for _ in range(1000):
            if not (self.live or self.flight or self.events):
                break
            self.call(0.25, True, False, True, 0, (0, 1), 1, 1)
        assert not self.live
        assert self.scheduler.pool.num_free == self.config.num_blocks
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert not self.scheduler._states
        assert list(self.module.replay(self.config, self.log)) == self.plans

    # What has to be true

    def submit(self) -> None:
        self.sound = False
        events, self.events = self.events, []
        self.log.append(self.module.record(self.now, events))
        plan = self.scheduler.step(self.now, events)
        self.plans.append(plan)
        self.check_ends(events, plan)
        self.check_blocks()
        if self.flight:
            assert not plan.scheduled
        else:
            self.check_work(plan)
            self.check_progress(plan)
        self.sound = True

    def check_ends(self, events: list[Any], plan: Any) -> None:
        """Each end comes once, for its reason, in the same call."""
        expected: list[tuple[int, FinishReason]] = []

        def end(id: int, reason: FinishReason) -> None:
            if self.live.pop(id, None):
                expected.append((id, reason))

        waiting = self.scheduler_waiting = getattr(self, "scheduler_waiting", 0)
        refused = {e.id for e in plan.finished if e.reason is FinishReason.REJECTED}
        for event in events:
            if isinstance(event, Request):
                too_long = event.max_len > self.config.capacity
                assert event.id in refused or not too_long
                if event.id in refused:
                    # By its length or the queue's: which is checked without a machine.
                    assert too_long or waiting + len(events) >= self.config.max_queue
                    expected.append((event.id, FinishReason.REJECTED))
                else:
                    rank = self.now + event.priority * self.config.priority_step_s
                    book = Book(event, (rank, self.arrivals), list(event.prompt))
                    self.live[event.id] = book
                    self.arrivals += 1
            elif isinstance(event, Abort):
                end(event.id, event.reason)
            else:
                self.retire(event, end)
        for id, book in list(self.live.items()):
            if book.request.deadline is not None and book.request.deadline <= self.now:
                end(id, FinishReason.DEADLINE)
        assert Counter((end.id, end.reason) for end in plan.finished) == Counter(expected)
        assert {live.id for live in self.scheduler._states.values()} == set(self.live)
        self.scheduler_waiting = self.scheduler.num_waiting

    def retire(self, event: Any, end: Any) -> None:
        flight, self.flight = self.flight, ()
        for book in self.live.values():
            book.drafts = ()
        if event.tokens is None:
            return
        given = event.drafts or ((),) * len(flight)
        for (work, book), new, drafts in zip(flight, event.tokens, given, strict=True):
            sure = len(work.tokens) - work.num_draft_tokens
            for position in range(work.start, work.start + len(work.tokens)):
                content = book.content(position, work.tokens[sure:])
                self.memory[self.slot(work, position)] = content
            if self.live.get(work.id) is book:
                book.tokens += new
                book.drafts = drafts
                book.computed = work.start + sure + max(0, len(new) - 1)
                if len(book.tokens) == book.request.max_len:
                    end(work.id, FinishReason.LENGTH)

    def slot(self, work: Any, position: int) -> tuple[int, int]:
        size = self.config.block_size
        return work.block_table[position // size], position % size

    def check_blocks(self) -> None:
        """Each block is free or used, by as many as have it in their tables."""
        pool = self.scheduler.pool
        used = [block for block, refs in enumerate(pool.refs) if refs]
        assert len(used) + pool.num_free == self.config.num_blocks
        assert not set(used) & set(pool._free)
        tables = [live.block_table for live in self.scheduler._states.values()]
        # One that ended in flight has its blocks till then, and no longer.
        tables += [
            work.block_table for work, book in self.flight if self.live.get(work.id) is not book
        ]
        counts = Counter(block for table in tables for block in table)
        assert pool.refs == [counts[block] for block in range(self.config.num_blocks)]
        assert pool._block_by_key == {
            key: block for block, key in enumerate(pool.keys) if key is not None
        }

    def check_work(self, plan: Any) -> None:
        """Within the budget, each in its own blocks, and what it reads is its own past."""
        pool = self.scheduler.pool
        assert (
            len({work.id for work in plan.scheduled})
            == len(plan.scheduled)
            <= self.config.max_num_seqs
        )
        for id in plan.preempted:
            if id in self.live:
                self.live[id].computed, self.live[id].drafts = None, ()
        for start in plan.admitted:
            book = self.live[start.id]
            assert book.computed is None
            assert 0 <= start.num_cached_tokens < len(book.tokens)
            book.computed = start.num_cached_tokens
        self.budget = self.config.prefill_only_budget
        if any(len(book.tokens) - 1 == book.computed for book in self.live.values()):
            self.budget = self.config.max_num_batched_tokens
        assert sum(len(work.tokens) for work in plan.scheduled) <= self.budget
        for work in plan.scheduled:
            book, end = self.live[work.id], work.start + len(work.tokens) - work.num_draft_tokens
            assert book.computed == work.start < end <= len(book.tokens)
            assert list(work.tokens[: end - work.start]) == book.tokens[work.start : end]
            assert work.needs_sampling == (end == len(book.tokens))
            self.check_drafts(plan, work, book)
            for position in range(work.start):
                assert self.memory[self.slot(work, position)] == book.content(position)
            for position in range(work.start, end + work.num_draft_tokens):
                block, _ = self.slot(work, position)
                assert pool.keys[block] is None, "a block with a key is written"
                assert pool.refs[block] == 1
        self.flight = tuple((work, self.live[work.id]) for work in plan.scheduled)
        if plan.scheduled:
            assert plan.step == self.step + 1
            self.step = plan.step

    def check_drafts(self, plan: Any, work: Any, book: Book) -> None:
        """They are those that were given, and as many as there is room for."""
        most = min(len(book.drafts), book.request.max_len - len(book.tokens) - 1)
        assert (
            work.tokens[len(work.tokens) - work.num_draft_tokens :]
            == book.drafts[: work.num_draft_tokens]
        )
        assert work.num_draft_tokens <= (most if work.needs_sampling else 0)
        whole = sum(len(work.tokens) for work in plan.scheduled) < self.budget
        if work.needs_sampling and whole and self.scheduler.pool.num_free:
            assert work.num_draft_tokens == most

    def check_progress(self, plan: Any) -> None:
        """The first in rank is served, and what is served is what the budget allows."""
        if not self.live:
            assert not plan.scheduled
            return
        first = min(self.live.values(), key=lambda book: book.place)
        assert first.request.id in {work.id for work in plan.scheduled}
        running = [live for live in self.scheduler._states.values() if live.block_table]
        lacking = sum(len(live.tokens) - live.num_computed for live in running)
        shares = sum(len(work.tokens) - work.num_draft_tokens for work in plan.scheduled)
        assert shares == min(lacking, self.budget)
