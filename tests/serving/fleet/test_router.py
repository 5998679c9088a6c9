from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from ingot.core.errors import ConfigError
from ingot.serving.engine.request import Request
from ingot.serving.engine.scheduler import Scheduler, SchedulerConfig, StepDone
from ingot.serving.fleet import router as real
from ingot.serving.fleet.router import (
    PREFIX_WEIGHT,
    SEQUENCE_TOKENS,
    Router,
    RouterConfig,
)
from tests.serving.planted import EFFORT, execute

REPLICAS = 4
TEXTS = ("0" * 400, "01" * 200, "0" * 200 + "1" * 200)


@dataclass
class Book:
    """What is known of a request from outside."""

    replica: int
    prompt_tokens: int


class Machine(RuleBasedStateMachine):
    """Lives of a router. The books have prefixes of tokens where the router has hashes."""

    module: ModuleType = real
    sound = False  # begun, and nothing found

    @initialize(
        size=st.sampled_from([1, 3, 40]),
        num_blocks=st.sampled_from([1, 4, 1000]),
        policy=st.sampled_from(["prefix"] * 6 + ["least-loaded", "round-robin"]),
        overload=st.sampled_from([0, 100, 1000]),
    )
    def begin(self, size: int, num_blocks: int, policy: str, overload: int) -> None:
        module: Any = self.module
        scheduler = SchedulerConfig(num_blocks=num_blocks, block_size=size)
        self.policy, self.overload = policy, overload
        config = module.RouterConfig(policy=policy, overload_tokens=overload)
        self.size, self.num_blocks = size, num_blocks
        self.new: Callable[[], Any] = lambda: module.Router(scheduler, config)
        self.router = self.new()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers: list[Any] = []
        self.known: set[int] = set()
        self.active: list[int] = []  # the least recently chosen first
        self.owned: dict[int, Book] = {}
        self.blocks: OrderedDict[Any, set[int]] = OrderedDict()
        self.sessions: OrderedDict[str, int] = OrderedDict()
        self.next_id = 0
        for replica in range(REPLICAS - 1):
            self.add(replica)
        self.sound = True

    def call(self, name: str, *arguments: Any) -> Any:
        self.sound = False
        answer = getattr(self.router, name)(*arguments)
        self.calls.append((name, arguments))
        self.answers.append(answer)
        return answer

    # What may happen

    @rule(
        text=st.sampled_from(TEXTS),
        length=st.sampled_from([1, 3, 40, 41, 120, 300]),
        session=st.sampled_from(["", "a", "a", "b", "c", "d", "e", "f"]),
        cache_salt=st.sampled_from([b"", b"", b"x"]),
        adapter=st.sampled_from(["", "", "x"]),
        max_cached_tokens=st.sampled_from([None, None, None, 0, 50]),
        copies=st.integers(1, 4),
        before=st.sampled_from([0, 0, 60]),
    )
    def arrive(
        self, text: str, length: int, session: str, copies: int, before: int, **options: Any
    ) -> None:
        for _ in range(copies):
            tokens = tuple(map(int, text[:length]))
            prompt, generated = tokens[: max(1, length - before)], tokens[max(1, length - before) :]
            options |= {"prompt": prompt, "generated": generated, "max_tokens": 400}
            request = Request(id=self.next_id, **options)
            self.next_id += 1
            self.check_choice(request, session, self.call("choose", request, session))
            self.check_state()

    @rule(which=st.integers(0, 100))
    def first_token(self, which: int) -> None:
        if self.owned:
            id = list(self.owned)[which % len(self.owned)]
            self.call("start_decoding", id)
            self.owned[id].prompt_tokens = 0
            self.check_state()

    @rule(which=st.integers(0, 100))
    def finish(self, which: int) -> None:
        if self.owned:
            id = list(self.owned)[which % len(self.owned)]
            self.call("finish", id)
            del self.owned[id]
            self.check_state()

    @rule(replica=st.integers(0, REPLICAS - 1))
    def add(self, replica: int) -> None:
        self.call("add", replica)
        self.known.add(replica)
        if replica not in self.active:
            self.active.append(replica)
        self.check_state()

    @rule(replica=st.integers(0, REPLICAS - 1))
    def drain(self, replica: int) -> None:
        self.call("drain", replica)
        self.active = [other for other in self.active if other != replica]
        self.check_state()

    @rule(replica=st.integers(0, REPLICAS - 1))
    def lose(self, replica: int) -> None:
        lost = self.call("lose", replica)
        assert lost == [id for id, book in self.owned.items() if book.replica == replica]
        self.owned = {id: book for id, book in self.owned.items() if id not in lost}
        self.known.discard(replica)
        self.active = [other for other in self.active if other != replica]
        for holders in self.blocks.values():
            holders.discard(replica)
        self.blocks = OrderedDict((key, held) for key, held in self.blocks.items() if held)
        self.sessions = OrderedDict((s, r) for s, r in self.sessions.items() if r != replica)
        self.drop_oldest()
        self.check_state()

    def teardown(self) -> None:
        """Without requests all loads are 0, and the same calls give the same answers."""
        if not self.sound:
            return
        while self.owned:
            self.finish(0)
        assert set(self.router.loads.values()) <= {0}
        copy = self.new()
        assert [getattr(copy, name)(*arguments) for name, arguments in self.calls] == self.answers

    # What has to be true

    def load(self, replica: int) -> int:
        books = [book for book in self.owned.values() if book.replica == replica]
        return sum(book.prompt_tokens + SEQUENCE_TOKENS for book in books)

    def prefixes(self, request: Request, limit: int) -> list[Any]:
        ends = range(self.size, limit + 1, self.size)
        return [(request.adapter, request.cache_salt, request.tokens[:end]) for end in ends]

    def cached(self, request: Request, replica: int) -> int:
        limit = len(request.tokens) - 1
        if request.max_cached_tokens is not None:
            limit = min(limit, request.max_cached_tokens)
        count = 0
        for prefix in self.prefixes(request, limit):
            if replica not in self.blocks.get(prefix, ()):
                break
            count += self.size
        return count

    def check_choice(self, request: Request, session: str, chosen: int | None) -> None:
        if not self.active:
            assert chosen is None
            return
        assert chosen in self.active
        assert chosen == self.expected(request, session)
        cached = self.cached(request, chosen) if self.policy == "prefix" else 0
        self.owned[request.id] = Book(chosen, len(request.tokens) - cached)
        self.active.remove(chosen)
        self.active.append(chosen)
        if self.policy == "prefix":
            for prefix in reversed(self.prefixes(request, len(request.tokens))):
                self.blocks.setdefault(prefix, set()).add(chosen)
                self.blocks.move_to_end(prefix)
            if session:
                self.sessions[session] = chosen
                self.sessions.move_to_end(session)
            self.drop_oldest()

    def expected(self, request: Request, session: str) -> int:
        """The first of the best: the least recently chosen."""
        if self.policy == "round-robin":
            return self.active[0]
        if self.policy == "least-loaded":
            return min(self.active, key=self.load)
        owner, least = self.sessions.get(session), min(map(self.load, self.active))
        if owner in self.active and self.load(owner) - least <= self.overload:
            return owner
        return min(
            self.active, key=lambda r: self.load(r) - PREFIX_WEIGHT * self.cached(request, r)
        )

    def drop_oldest(self) -> None:
        for entries in (self.blocks, self.sessions):
            while len(entries) > self.num_blocks * len(self.known):
                entries.popitem(last=False)

    def check_state(self) -> None:
        router = self.router
        assert router.loads == {replica: self.load(replica) for replica in self.known}
        assert min(router.loads.values(), default=0) >= 0
        assert {id: r.replica for id, r in router._outstanding.items()} == {
            id: book.replica for id, book in self.owned.items()
        }
        assert len(router._blocks) == len(self.blocks) <= self.num_blocks * len(self.known)
        assert router._sessions == self.sessions
        assert len(self.sessions) <= self.num_blocks * len(self.known)
        assert {replica for held in router._blocks.values() for replica in held} <= self.known
        self.sound = True


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.slow
def test_the_machine_finds_nothing_in_a_long_time() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=3000))


# Each is a mistake that one could make; the machine has to find every one of them.
FAULTS = {
    "a drained replica is chosen": ("self._active.pop(replica, None)", "pass"),
    "a drained replica keeps its sessions": ("owner in self._active and", "owner in loads and"),
    "a lost replica is chosen": ("self.drain(replica)\n", "pass\n"),
    "requests of a lost replica keep their owner": (
        "            del self._outstanding[id]\n",
        "            pass\n",
    ),
    "blocks of a lost replica are still found": ("if holders == (replica,):", "if False:"),
    "shared blocks of a lost replica are still found": ("elif replica in holders:", "elif False:"),
    "sessions of a lost replica stay": ("if owner == replica:", "if False:"),
    "a prompt is subtracted twice": ("        request.prompt_tokens = 0\n", ""),
    "a prompt is computed until its request ends": (
        "        self.loads[request.replica] -= request.prompt_tokens\n",
        "",
    ),
    "a finished request stays in the load": (
        "-= request.prompt_tokens + SEQUENCE_TOKENS",
        "-= request.prompt_tokens",
    ),
    "a finished request has an owner": (
        "request = self._outstanding.pop(id)",
        "request = self._outstanding[id]",
    ),
    "a cached prefix is part of the load": (" - cached.get(replica, 0)", ""),
    "ties go to the same replica": ("        self._active.move_to_end(replica)\n", ""),
    "an overloaded replica keeps its session": ("+ self.config.overload_tokens", "+ 10**9"),
    "sessions move": ("            return owner\n", "            pass\n"),
    "sessions are not bounded": ("(self._blocks, self._sessions)", "(self._blocks,)"),
    "blocks are not bounded": ("(self._blocks, self._sessions)", "(self._sessions,)"),
    "the newest blocks are dropped": ("entries.popitem(last=False)", "entries.popitem()"),
    "the first block of a prefix is dropped first": ("in reversed(keys)", "in keys"),
    "blocks do not become recent again": ("            self._blocks.move_to_end(key)\n", ""),
    "the load does not count": ("loads[r] - PREFIX_WEIGHT * cached[r]", "-cached[r]"),
    "a cached prefix does not count": ("loads[r] - PREFIX_WEIGHT * cached[r]", "loads[r]"),
    "only one replica has a block": ("(*holders, replica)", "(replica,)"),
    "tenants share blocks": ("request.cache_salt)", 'b"")'),
    "adapters share blocks": ("root_key(request.adapter,", 'root_key("",'),
    "the last token is taken from the cache": ("len(request.tokens) - 1", "len(request.tokens)"),
    "tokens generated before are not counted": (
        "request.num_tokens - c",
        "len(request.prompt) - c",
    ),
    "blocks of tokens generated before are not known": (
        "self.scheduler.block_size, request.tokens",
        "self.scheduler.block_size, request.prompt",
    ),
    "the limit of cached tokens is ignored": ("min(limit, request.max_cached_tokens)", "limit"),
    "a prefix ends where the longest ends": (
        "holders - remaining, num_tokens)",
        "holders, num_tokens + size)",
    ),
    "choices depend on more than the calls": (
        "return min(self._active, key=self.loads.__getitem__)",
        "return min(self._active, key=lambda r: (self.loads[r], __import__('random').random()))",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_machine_finds_a_planted_fault(fault: str) -> None:
    class Faulty(Machine):
        module = execute(real, *FAULTS[fault])

    with pytest.raises((AssertionError, KeyError, ValueError, Flaky)):
        run_state_machine_as_test(Faulty, settings=EFFORT)


def test_the_machine_finds_nothing_where_nothing_is_planted() -> None:
    class Copy(Machine):
        module = execute(real, "", "")

    run_state_machine_as_test(Copy, settings=settings(EFFORT, max_examples=20))


def make(
    policy: Any = "prefix", replicas: int = 3, num_blocks: int = 1000, **config: Any
) -> Router:
    scheduler = SchedulerConfig(num_blocks=num_blocks, block_size=32)
    router = Router(scheduler, RouterConfig(policy=policy, **config))
    for replica in range(replicas):
        router.add(replica)
    return router


def make_request(id: int, length: int = 100, prefix: tuple[int, ...] = ()) -> Request:
    """Prompts of different ids share the prefix only."""
    return Request(id=id, prompt=(*prefix, 1000 + id, *range(length - 1)), max_tokens=9)


SHARED = tuple(range(256))


@given(
    policy=st.sampled_from(["prefix", "least-loaded", "round-robin"]),
    replicas=st.integers(1, 20),
    count=st.integers(0, 100),
)
@settings(max_examples=30)
def test_equal_requests_are_spread_evenly(policy: str, replicas: int, count: int) -> None:
    router = make(policy, replicas)
    chosen = [router.choose(make_request(id)) for id in range(count)]
    counts = [chosen.count(replica) for replica in range(replicas)]
    assert max(counts) - min(counts) <= 1


@given(lengths=st.lists(st.integers(1, 500), max_size=100), replicas=st.integers(1, 8))
@settings(max_examples=30)
def test_loads_differ_by_one_request_or_the_prefix_at_most(
    lengths: list[int], replicas: int
) -> None:
    router = make("prefix", replicas)
    for id, length in enumerate(lengths):
        router.choose(make_request(id, length, SHARED))
    loads = router.loads.values()
    largest = max(lengths, default=0) + len(SHARED) + SEQUENCE_TOKENS
    assert max(loads) - min(loads) <= PREFIX_WEIGHT * len(SHARED) + largest


def test_a_repeated_prefix_goes_to_its_replica_until_that_is_overloaded() -> None:
    router = make()
    holder = router.choose(make_request(0, prefix=SHARED))
    router.start_decoding(0)
    chosen = [router.choose(make_request(id, prefix=SHARED)) for id in range(1, 20)]
    # Each adds 100 tokens and a sequence; the prefix counts 3 * 256.
    before = (PREFIX_WEIGHT * 256 - SEQUENCE_TOKENS) // (100 + SEQUENCE_TOKENS) + 1
    assert chosen[:before] == [holder] * before
    assert chosen[before] != holder
    assert set(chosen) == {0, 1, 2}, "the prefix spreads"


def test_a_prefix_of_another_tenant_is_not_followed() -> None:
    router = make()
    assert router.choose(make_request(0, prefix=SHARED)) == 0
    other = Request(id=1, prompt=(*SHARED, 1), max_tokens=9, cache_salt=b"x")
    assert router.choose(other) == 1


def test_a_session_stays_until_its_replica_is_overloaded_drained_or_lost() -> None:
    router = make(overload_tokens=1000)
    owner = router.choose(make_request(0), "a")
    assert owner is not None
    assert [router.choose(make_request(id), "a") for id in range(1, 6)] == [owner] * 5
    router.choose(make_request(6, 500), "a")
    assert router.loads[owner] > 1000
    moved = router.choose(make_request(7), "a")
    assert moved != owner
    assert moved is not None
    router.drain(moved)
    third = router.choose(make_request(8), "a")
    assert third not in (owner, moved)
    assert third is not None
    assert router.lose(third) == [8]
    assert router.choose(make_request(8), "a") == owner


def test_without_replicas_none_is_chosen() -> None:
    router = make(replicas=1)
    router.drain(0)
    assert router.choose(make_request(0)) is None
    router.add(0)
    assert router.choose(make_request(0)) == 0
    with pytest.raises(ValueError, match="has a replica already"):
        router.choose(make_request(0))


def test_the_keys_are_those_of_the_scheduler() -> None:
    request = Request(id=1, prompt=tuple(range(100)), max_tokens=9, adapter="x", cache_salt=b"y")
    router = make(replicas=1)
    router.choose(request)
    scheduler = Scheduler(router.scheduler)
    plan = scheduler.step(0.0, [request])
    scheduler.step(1.0, [StepDone(plan.step, ((5,),))])
    sealed = [key for key in scheduler.pool.keys if key is not None]
    assert set(router._blocks) == set(sealed)
    assert len(sealed) == 3


@pytest.mark.parametrize("wrong", [{"overload_tokens": -1}, {"policy": "random"}])
def test_settings_are_bounded(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        RouterConfig(**wrong)
