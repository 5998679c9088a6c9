from __future__ import annotations

from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from ingot.core.errors import ConfigError
from ingot.serving.engine import blocks, scheduler
from ingot.serving.engine.request import Abort, FinishReason, Request
from ingot.serving.engine.sampling_params import Grammar, SamplingParams
from ingot.serving.engine.scheduler import (
    Admitted,
    Event,
    Finished,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepDone,
    record,
    replay,
)
from tests.serving.machine import Machine
from tests.serving.planted import EFFORT, execute

TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=200, stateful_step_count=40)


@pytest.mark.slow
def test_the_machine_finds_nothing_in_a_long_time() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=4000))


# Each is a mistake that one could make; the machine has to find every one of them.
FAULTS = {
    "a block is freed by the first of its users": (
        blocks,
        "            if not self.refs[block]:\n                self._free[block] = None",
        "            if True:\n                self._free[block] = None",
    ),
    "a shared block is not counted": (blocks, "            refs[block] += 1\n", ""),
    "a shared block stays in the free list": (blocks, "del free[block]", "pass"),
    "an evicted block keeps its key": (blocks, "            self.keys[block] = None\n", ""),
    "an evicted block is still found": (blocks, "            del self._block_by_key[key]\n", ""),
    "allocation takes what there is": (
        blocks,
        "            return None\n        for",
        "            count = len(free)\n        for",
    ),
    "a key does not tell what came before": (blocks, "sha256(parent + _packer", "sha256(_packer"),
    "only the end of a sequence is attended to": (
        scheduler,
        "state.next_event_at = min(next_block, state.request.max_len - 1)",
        "state.next_event_at = state.request.max_len - 1",
    ),
    "the end of a sequence is missed": (
        scheduler,
        "state.request.max_len - 1)",
        "state.request.max_len)",
    ),
    "tenants share": (blocks, "model_version.encode(), cache_salt)", "model_version.encode())"),
    "adapters share": (blocks, "(adapter.encode(), ", "("),
    "a full hit computes nothing": (
        scheduler,
        "(tokens - 1) // size",
        "tokens // size",
    ),
    "blocks are sealed before they are full": (
        scheduler,
        "num_full = state.num_computed // size\n        state.hash",
        "num_full = len(state.block_table)\n        state.hash",
    ),
    "a failed step counts": (scheduler, ", [0] * len(in_flight)", ", counts"),
    "a hit counts as one token more": (
        scheduler,
        "state.num_computed = len(cached) * size",
        "state.num_computed = len(cached) * size + bool(cached)",
    ),
    "the budget is exceeded by long prompts": (
        scheduler,
        "left = [1] * len(scheduled), budget - len(scheduled)",
        "left = [1] * len(scheduled), budget",
    ),
    "blocks come back in flight": (
        scheduler,
        "if state not in self._in_flight:",
        "if True:",
    ),
    "blocks of those who left are kept": (
        scheduler,
        "                self.pool.release(state.block_table)\n                continue",
        "                continue",
    ),
    "waiting requests have no deadline": (
        scheduler,
        "if state and state.rank_key[1] == arrival:",
        "if state and state.block_table and state.rank_key[1] == arrival:",
    ),
    "a deadline outlives its request": (
        scheduler,
        "if state and state.rank_key[1] == arrival:",
        "if state:",
    ),
    "the last ends twice": (
        scheduler,
        "            self._finish(state, FinishReason.LENGTH)\n",
        "            self._finished.append(Finished(state.id, FinishReason.LENGTH))\n",
    ),
    "preempted requests keep their blocks": (
        scheduler,
        "        self.pool.release(state.block_table)\n        state.block_table",
        "        state.block_table",
    ),
    "preempted requests are lost": (
        scheduler,
        "        insort(self._waiting, state, key=_by_rank)\n        self._preempted",
        "        self._preempted",
    ),
    "the first is preempted": (
        scheduler,
        "state = self._running.pop()",
        "state = self._running.pop(0)",
    ),
    "the last to come is the first to start": (
        scheduler,
        "self._try_admit(self._waiting[0]):\n            del self._waiting[0]",
        "self._try_admit(last := self._waiting[-1]):\n            self._waiting.remove(last)",
    ),
    "nobody overtakes": (
        scheduler,
        "if ahead == config.max_num_seqs:",
        "if len(running) == config.max_num_seqs:",
    ),
    "blocks are taken from nobody": (scheduler, "if len(running) == ahead:", "if has_place:"),
    "the last block is never given": (blocks, "> len(free):", ">= len(free):"),
    "priority is forgotten": (
        scheduler,
        "self.now + request.priority * config.priority_step_s",
        "self.now",
    ),
    "long prompts go first": (
        scheduler,
        "        counts, left =",
        "        if len(in_flight) < len(self._running):\n"
        "            scheduled, in_flight = scheduled[:-1], in_flight[:-1]\n"
        "        counts, left =",
    ),
    "drafts are never tried": (scheduler, "if self._has_drafts and left:", "if False:"),
    "streams wait for long prompts": (
        scheduler,
        "budget = config.max_num_batched_tokens if in_flight",
        "budget = config.prefill_only_budget if in_flight",
    ),
    "drafts exceed the budget": (scheduler, "min(left, state.request", "min(99, state.request"),
    "drafts go past the end": (scheduler, "max_len - known - 1)]", "max_len - known)]"),
    "drafts have no room": (scheduler, "drafts[: len(state.block_table) * size - known]", "drafts"),
    "drafts outlive preemption": (
        scheduler,
        "state.block_table = state.drafts = ()",
        "state.block_table = ()",
    ),
    "drafts write where others read": (
        scheduler,
        "state.block_table += self.pool.allocate(",
        "state.block_table += (0,) * count or self.pool.allocate(",
    ),
    "the blocks of drafts are lost": (
        scheduler,
        "            state.block_table += self.pool.allocate(count) or ()\n",
        "            self.pool.allocate(count)\n",
    ),
    "wrong drafts count": (
        scheduler,
        "num_computed += len(new) - 1",
        "num_computed += len(draft)",
    ),
    "right drafts do not count": (scheduler, "num_computed += len(new) - 1", "pass"),
    "old drafts are tried again": (
        scheduler,
        "self._has_drafts = any(event.drafts)",
        "self._has_drafts = True",
    ),
    "plans depend on more than the log": (
        blocks,
        "self._free.popitem(last=False)",
        "self._free.popitem(last=hash(object()) % 3 == 0)",
    ),
}


def planted(original: ModuleType, old: str, new: str) -> ModuleType:
    """The scheduler with a mistake in it or in its blocks."""
    copy: Any = execute(scheduler, *((old, new) if original is scheduler else ("", "")))
    if original is blocks:
        faulty: Any = execute(blocks, old, new)
        copy.BlockPool = faulty.BlockPool
        copy.block_key, copy.root_key = faulty.block_key, faulty.root_key
    return copy


@pytest.mark.parametrize("fault", FAULTS)
def test_the_machine_finds_a_planted_fault(fault: str) -> None:
    class Faulty(Machine):
        module = planted(*FAULTS[fault])

    with pytest.raises((AssertionError, ValueError, IndexError, Flaky)):
        run_state_machine_as_test(Faulty, settings=EFFORT)


@pytest.mark.parametrize("original", [scheduler, blocks])
def test_the_machine_finds_nothing_where_nothing_is_planted(original: ModuleType) -> None:
    class Copy(Machine):
        module = planted(original, "", "")

    run_state_machine_as_test(Copy, settings=settings(EFFORT, max_examples=20))


def serve(scheduler: Scheduler, *requests: Request) -> list[SchedulerOutput]:
    return finish(scheduler, scheduler.step(0.0, requests))


def finish(scheduler: Scheduler, plan: SchedulerOutput) -> list[SchedulerOutput]:
    """All plans until everything has ended; the tokens sampled are 1001, 1002 and so on."""
    plans = [plan]
    while plans[-1].scheduled:
        new = tuple(
            (1000 + len(plans),) if work.needs_sampling else () for work in plans[-1].scheduled
        )
        plans.append(scheduler.step(scheduler.now, [StepDone(plans[-1].step, new)]))
    return plans


def shares(plan: SchedulerOutput) -> dict[int, int]:
    return {work.id: len(work.tokens) for work in plan.scheduled}


def test_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=20, block_size=4, max_num_batched_tokens=5, max_num_seqs=4)
    )
    first = scheduler.step(0.0, [Request(id=1, prompt=(1, 2), max_tokens=9)])
    long = Request(id=2, prompt=tuple(range(11)), max_tokens=1)
    plan = scheduler.step(1.0, [StepDone(first.step, ((50,),)), long])
    assert shares(plan) == {1: 1, 2: 4}
    plan = scheduler.step(2.0, [StepDone(plan.step, ((51,), ()))])
    assert shares(plan) == {1: 1, 2: 4}
    plan = scheduler.step(3.0, [StepDone(plan.step, ((52,), ()))])
    assert shares(plan) == {1: 1, 2: 3}
    assert [work.needs_sampling for work in plan.scheduled] == [True, True]


def test_a_prefix_is_found_but_the_last_token_is_computed_all_the_same() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=20, block_size=4))
    prompt = tuple(range(8))
    serve(scheduler, Request(id=1, prompt=prompt, max_tokens=1))
    again = serve(scheduler, Request(id=2, prompt=prompt, max_tokens=1))
    assert again[0].admitted == (Admitted(2, 4),)
    longer = serve(scheduler, Request(id=3, prompt=(*prompt, 9), max_tokens=1))
    assert longer[0].admitted == (Admitted(3, 8),)


def test_an_answer_is_found_as_part_of_the_next_prompt() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=20, block_size=2))
    answer = [1000 + step for step in range(1, 6)]
    serve(scheduler, Request(id=1, prompt=(1, 2, 3), max_tokens=5))
    chat = Request(id=2, prompt=(1, 2, 3, *answer, 4), max_tokens=1)
    assert serve(scheduler, chat)[0].admitted == (Admitted(2, 6),)


@pytest.mark.parametrize("other", [{"cache_salt": b"x"}, {"adapter": "x"}])
def test_tenants_and_adapters_find_only_their_own(other: dict[str, Any]) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=20, block_size=2))
    prompt = tuple(range(9))
    serve(scheduler, Request(id=1, prompt=prompt, max_tokens=1))
    assert serve(scheduler, Request(id=2, prompt=prompt, max_tokens=1, **other))[0].admitted == (
        Admitted(2, 0),
    )


def test_who_has_no_block_left_takes_one_from_the_last() -> None:
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=4, block_size=2, max_num_batched_tokens=8, max_num_seqs=2)
    )
    old = Request(id=1, prompt=(1, 2, 3), max_tokens=5)
    plan = scheduler.step(0.0, [old])
    plan = scheduler.step(
        1.0, [StepDone(plan.step, ((9,),)), Request(id=2, prompt=(5,), max_tokens=4)]
    )
    assert shares(plan) == {1: 1, 2: 1}
    plan = scheduler.step(2.0, [StepDone(plan.step, ((9,), (7,)))])
    assert (plan.preempted, shares(plan)) == ((), {1: 1, 2: 1})
    plan = scheduler.step(3.0, [StepDone(plan.step, ((9,), (8,)))])
    assert (plan.preempted, shares(plan)) == ((2,), {1: 1})
    rest = finish(scheduler, plan)
    assert [end.id for plan in rest for end in plan.finished] == [1, 2]


def test_a_priority_is_a_head_start_in_seconds() -> None:
    config = SchedulerConfig(
        num_blocks=8, block_size=4, max_num_batched_tokens=1, max_num_seqs=1, priority_step_s=10.0
    )
    scheduler = Scheduler(config)
    plan = scheduler.step(0.0, [Request(id=1, prompt=(1,), max_tokens=1)])
    scheduler.step(1.0, [Request(id=2, prompt=(1,), max_tokens=1, priority=1)])
    scheduler.step(10.5, [Request(id=3, prompt=(1,), max_tokens=1)])
    scheduler.step(11.5, [Request(id=4, prompt=(1,), max_tokens=1)])
    order = [end.id for plan in finish(scheduler, plan) for end in plan.finished]
    assert order == [1, 3, 2, 4]


def test_who_would_get_no_tokens_does_not_start() -> None:
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=16, block_size=4, max_num_batched_tokens=4, max_num_seqs=4)
    )
    long = Request(id=1, prompt=tuple(range(35)), max_tokens=1)
    plans = serve(scheduler, long, Request(id=2, prompt=(1, 2), max_tokens=1))
    assert [shares(plan) for plan in plans] == [{1: 16}, {1: 16}, {1: 3, 2: 2}, {}]
    assert [len(plan.admitted) for plan in plans] == [1, 0, 1, 0]


def test_no_request_is_preempted_in_vain() -> None:
    """The second would need more than the last could give."""
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=9,
            block_size=1,
            max_num_batched_tokens=16,
            max_num_seqs=4,
            priority_step_s=1.0,
        )
    )
    first = Request(id=1, prompt=(1, 2, 3, 4), max_tokens=3)
    last = Request(id=3, prompt=(9,), max_tokens=3, priority=50)
    plan = scheduler.step(0.0, [first, last])
    second = Request(id=2, prompt=(5, 6, 7, 8, 9), max_tokens=1)
    plan = scheduler.step(1.0, [StepDone(plan.step, ((7,), (7,))), second])
    assert shares(plan) == {1: 1, 3: 1}
    plans = finish(scheduler, plan)
    assert [end.id for plan in plans for end in plan.finished] == [1, 3, 2]
    assert not any(plan.preempted for plan in plans)


def test_what_can_never_fit_and_what_is_too_much_is_refused() -> None:
    scheduler = Scheduler(
        SchedulerConfig(
            num_blocks=2, block_size=2, max_num_batched_tokens=1, max_num_seqs=1, max_queue=1
        )
    )
    plan = scheduler.step(0.0, [Request(id=1, prompt=(1, 2, 3), max_tokens=2)])
    assert plan.finished == (Finished(1, FinishReason.REJECTED),)
    assert scheduler.step(0.0, [Request(id=2, prompt=(1, 2, 3), max_tokens=1)]).scheduled
    scheduler.step(0.0, [Request(id=3, prompt=(1,), max_tokens=1)])
    plan = scheduler.step(0.0, [Request(id=4, prompt=(1,), max_tokens=1)])
    assert plan.finished == (Finished(4, FinishReason.REJECTED),)


def test_abort_in_flight_is_reported_at_once_and_frees_blocks_at_the_next_step() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=4, block_size=2))
    plan = scheduler.step(0.0, [Request(id=1, prompt=(1, 2, 3), max_tokens=2)])
    assert scheduler.step(0.1, [Abort(1, FinishReason.CANCELLED)]).finished == (
        Finished(1, FinishReason.CANCELLED),
    )
    assert scheduler.pool.num_free == 2
    assert not scheduler.step(0.2, [StepDone(plan.step, ((7,),))]).finished
    assert scheduler.pool.num_free == 4


@pytest.mark.parametrize(
    "events",
    [
        [StepDone(2, ((7,),))],
        [StepDone(1, ((),))],
        [StepDone(1, ((7,), (8,)))],
        [StepDone(1, ((7, 8),))],
        [StepDone(1, ((7,),), ((), (8,)))],
        [StepDone(1, ((7,),)), StepDone(1, ((7,),))],
        [Request(id=1, prompt=(1,), max_tokens=1)],
    ],
)
def test_impossible_events_are_rejected(events: list[Any]) -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=4, block_size=2))
    scheduler.step(0.0, [Request(id=1, prompt=(1, 2, 3), max_tokens=2)])
    with pytest.raises(ValueError, match=r"flight|unexpected|argument|duplicate|drafts"):
        scheduler.step(0.0, events)


def test_the_clock_does_not_go_back() -> None:
    scheduler = Scheduler(SchedulerConfig(num_blocks=4))
    scheduler.step(1.0)
    for now in (0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="clock"):
            scheduler.step(now)


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_blocks": 0},
        {"block_size": 0},
        {"max_num_batched_tokens": 63},
        {"priority_step_s": float("nan")},
        {"priority_step_s": -1},
    ],
)
def test_limits_are_bounded(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SchedulerConfig(**{"num_blocks": 4, **wrong})


def test_a_log_is_read_back_whole() -> None:
    options = SamplingParams(
        seed=3, logit_bias=((5, -1.5),), grammar=Grammar(kind="regex", text="a*")
    )
    request = Request(
        id=1, prompt=(1, 2), max_tokens=2, deadline=9.0, cache_salt=b"\xff", sampling_params=options
    )
    line = record(0.0, [request])
    assert msgspec.json.decode(line, type=tuple[float, list[Event]])[1] == [request]
    log = [
        record(0.0, [request]),
        record(1.0, [StepDone(1, ((5,),))]),
        record(2.0, [StepDone(2, None)]),
    ]
    assert [len(plan.scheduled) for plan in replay(SchedulerConfig(num_blocks=4), log)] == [1, 1, 1]
    with pytest.raises(msgspec.ValidationError):
        list(replay(SchedulerConfig(num_blocks=4), [b'[0, [{"type": "Request", "id": "x"}]]']))


def test_drafts_are_computed_with_the_last_token_and_bring_as_many_as_were_right() -> None:
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=8, block_size=4, max_num_batched_tokens=8, max_num_seqs=2)
    )
    plan = scheduler.step(0.0, [Request(id=1, prompt=(1, 2, 3), max_tokens=9)])
    plan = scheduler.step(1.0, [StepDone(plan.step, ((4,),), ((5, 6, 7),))])
    (work,) = plan.scheduled
    assert (work.start, work.tokens, work.num_draft_tokens) == (3, (4, 5, 6, 7), 3)
    plan = scheduler.step(2.0, [StepDone(plan.step, ((5, 6, 9),), ((1,) * 20,))])
    (work,) = plan.scheduled
    assert (work.start, work.tokens) == (6, (9, 1, 1, 1, 1))
    with pytest.raises(ValueError, match="drafts"):
        scheduler.step(3.0, [StepDone(plan.step, ((1, 2, 1),))])


def test_no_request_is_preempted_for_a_draft() -> None:
    scheduler = Scheduler(
        SchedulerConfig(num_blocks=3, block_size=2, max_num_batched_tokens=8, max_num_seqs=2)
    )
    requests = [Request(id=id, prompt=(id,), max_tokens=4) for id in (1, 2)]
    plan = scheduler.step(0.0, requests)
    plan = scheduler.step(1.0, [StepDone(plan.step, ((4,), (5,)), ((6, 7), (6, 7)))])
    assert not plan.preempted
    assert [(work.tokens, work.num_draft_tokens) for work in plan.scheduled] == [
        ((4, 6, 7), 2),
        ((5,), 0),
    ]
