"""The memory plan of a fleet, as a state machine under random requests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ingot.core.errors import ConfigError
from ingot.serving.fleet.memory import (
    DeploymentUse,
    Footprint,
    MemoryPlan,
    check_budget,
    plan_memory,
    total_bytes,
)

Planner = Callable[[int, Sequence[DeploymentUse], Sequence[str]], MemoryPlan]
BUDGET = 20
SIZES = {
    "pinned": ("p", 3, 1),
    "big": ("b", 12, 2),
    "small": ("s", 2, 1),
    "other": ("o", 5, 2),
    "twin": ("o", 5, 3),
    "last": ("l", 8, 1),
}
"""Weights and bytes; `other` and `twin` have the same weights."""


class Fleet:
    """Deployments, their requests and those that wait, as a server would have them."""

    def __init__(self, planner: Planner) -> None:
        self.plan, self.now = planner, 0.0
        self.queue: dict[str, int] = {}
        self.held: frozenset[str] = frozenset()
        self.uses = {
            name: DeploymentUse(
                name=name,
                footprint=Footprint(weights=weights, weights_bytes=size, private_bytes=private),
                is_loaded=False,
                is_ready=False,
                pinned=name == "pinned",
            )
            for name, (weights, size, private) in SIZES.items()
        }
        self.set("pinned", is_loaded=True, is_ready=True)

    def set(self, name: str, **fields: object) -> None:
        self.uses[name] = replace(self.uses[name], **fields)  # pyright: ignore

    @property
    def loading(self) -> list[str]:
        return [
            name
            for name, use in self.uses.items()
            if use.is_loaded and not use.is_ready and not use.is_unloading
        ]

    @property
    def unloading(self) -> list[str]:
        return [name for name, use in self.uses.items() if use.is_unloading]

    @property
    def busy(self) -> list[str]:
        return [name for name, use in self.uses.items() if use.num_requests]

    def request(self, name: str) -> None:
        if self.uses[name].is_ready and name not in self.held:
            self.enter(name, 1)
        else:
            self.queue[name] = self.queue.get(name, 0) + 1
        self.update()

    def enter(self, name: str, count: int) -> None:
        self.now += 1
        requests = self.uses[name].num_requests + count
        self.set(name, num_requests=requests, last_use=self.now)

    def finish(self, name: str) -> None:
        self.set(name, num_requests=self.uses[name].num_requests - 1)
        self.update()

    def loaded(self, name: str) -> None:
        self.set(name, is_ready=True)
        self.update()

    def exited(self, name: str) -> None:
        self.set(name, is_loaded=False, is_unloading=False)
        self.update()

    def update(self) -> None:
        """Apply plans until nothing changes: requests enter where they can."""
        while True:
            plan = self.plan(BUDGET, list(self.uses.values()), list(self.queue))
            self.check_plan(plan)
            self.held = frozenset(plan.hold)
            for name in plan.load:
                assert not self.uses[name].is_loaded
                self.set(name, is_loaded=True)
            for name in plan.unload:
                self.set(name, is_ready=False, is_unloading=True)
            able = [n for n in self.queue if self.uses[n].is_ready and n not in self.held]
            for name in able:
                self.enter(name, self.queue.pop(name))
            self.check_budget()
            if not able:
                return

    def check_budget(self) -> None:
        used = [use.footprint for use in self.uses.values() if use.is_loaded]
        assert total_bytes(used) <= BUDGET, "the budget is exceeded"

    def check_plan(self, plan: MemoryPlan) -> None:
        uses = self.uses
        victims = [*plan.unload, *plan.hold]
        assert all(uses[name].is_ready for name in victims)
        assert not any(uses[name].pinned for name in victims), "a pinned one is unloaded"
        assert not any(uses[name].num_requests for name in plan.unload), "a busy one is unloaded"
        assert all(uses[name].num_requests for name in plan.hold), "an idle one is held"
        if not victims:
            return
        assert self.queue, "nothing is unloaded without a need"
        wanted = next(n for n in self.queue if n not in plan.load and not self.present(n))
        keep = {n for n in uses if self.present(n)} | {*plan.load, wanted}

        def fits(names: set[str]) -> bool:
            return total_bytes(uses[name].footprint for name in names) <= BUDGET

        assert fits(keep - {*victims}), "not enough"
        assert all(not fits(keep - {*victims} | {name}) for name in victims), "one too many"
        first = list(self.queue)[: list(self.queue).index(wanted)]
        order = sorted(
            (n for n in uses if uses[n].is_ready and not uses[n].pinned and n not in first),
            key=lambda n: (uses[n].num_requests > 0, uses[n].last_use),
        )
        needed = next(k for k in range(len(order) + 1) if fits(keep - {*order[:k]}))
        assert {*victims} <= {*order[:needed]}, "not the least recently used"

    def present(self, name: str) -> bool:
        return self.uses[name].is_loaded and not self.uses[name].is_unloading


class FleetMachine(RuleBasedStateMachine):
    """Random requests and events; at the end, all that wait are served."""

    planner: Planner = staticmethod(plan_memory)

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet(self.planner)

    @rule(name=st.sampled_from(sorted(SIZES)))
    def request(self, name: str) -> None:
        self.fleet.request(name)

    @rule(data=st.data(), event=st.sampled_from(["busy", "loading", "unloading"]))
    def happen(self, data: st.DataObject, event: str) -> None:
        names = getattr(self.fleet, event)
        if names:
            name = data.draw(st.sampled_from(names))
            step = {"busy": "finish", "loading": "loaded", "unloading": "exited"}[event]
            getattr(self.fleet, step)(name)

    @rule(name=st.sampled_from(sorted(SIZES)))
    def give_up(self, name: str) -> None:
        """Requests that wait have timed out."""
        if self.fleet.queue.pop(name, None):
            self.fleet.update()

    @invariant()
    def queue_is_of_those_that_cannot_serve(self) -> None:
        uses, held = self.fleet.uses, self.fleet.held
        assert all(not uses[n].is_ready or n in held for n in self.fleet.queue)

    def teardown(self) -> None:
        """However busy the ready ones are, all that wait are served: new requests keep coming."""
        fleet, waiting = self.fleet, set(self.fleet.queue)
        rng = random.Random(0)
        for _ in range(40 * len(SIZES)):
            if not waiting:
                return
            for name in fleet.unloading:
                fleet.exited(name)
            for name in fleet.loading:
                fleet.loaded(name)
            for name in [n for n in fleet.uses if fleet.uses[n].is_ready]:
                # The new request arrives before the old ones finish: never idle unless held.
                old = fleet.uses[name].num_requests
                if name not in waiting or rng.random() < 0.5:
                    fleet.request(name)
                for _ in range(old):
                    fleet.finish(name)
            waiting &= set(fleet.queue)
        raise AssertionError(f"{waiting} wait forever")


SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much]
SETTINGS = settings(
    max_examples=80, stateful_step_count=25, suppress_health_check=SLOW, deadline=None
)
PLANTED = settings(
    SETTINGS, phases=[Phase.generate], report_multiple_bugs=False, derandomize=True, database=None
)
TestFleetMachine = FleetMachine.TestCase
TestFleetMachine.settings = SETTINGS


def forget_exits(budget: int, uses: Sequence[DeploymentUse], queue: Sequence[str]) -> MemoryPlan:
    """Take the memory of a process that is exiting for free."""
    free = [replace(one, is_loaded=one.is_loaded and not one.is_unloading) for one in uses]
    return plan_memory(budget, free, queue)


def ignore(**fields: object) -> Planner:
    """Plan without some knowledge."""

    def plan(budget: int, uses: Sequence[DeploymentUse], queue: Sequence[str]) -> MemoryPlan:
        return plan_memory(budget, [replace(one, **fields) for one in uses], queue)  # pyright: ignore

    return plan


def evict_latest(budget: int, uses: Sequence[DeploymentUse], queue: Sequence[str]) -> MemoryPlan:
    return plan_memory(budget, [replace(one, last_use=-one.last_use) for one in uses], queue)


def never_hold(budget: int, uses: Sequence[DeploymentUse], queue: Sequence[str]) -> MemoryPlan:
    plan = plan_memory(budget, uses, queue)
    return MemoryPlan(plan.load) if plan.hold else plan


def evict_all(budget: int, uses: Sequence[DeploymentUse], queue: Sequence[str]) -> MemoryPlan:
    plan = plan_memory(budget, uses, queue)
    idle = [one.name for one in uses if one.is_ready and not one.pinned and not one.num_requests]
    more = set(idle) - set(queue) | set(plan.unload)
    return plan._replace(unload=tuple(more)) if plan.unload else plan


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (forget_exits, "budget is exceeded|not self.uses"),
        (ignore(num_requests=0), "a busy one is unloaded"),
        (ignore(pinned=False), "a pinned one is unloaded"),
        (evict_latest, "not the least recently used"),
        (never_hold, "wait forever"),
        (evict_all, "one too many"),
    ],
    ids=["exits", "busy", "pins", "order", "hold", "minimum"],
)
def test_a_planted_fault_is_found(planner: Planner, message: str) -> None:
    class Faulty(FleetMachine):
        pass

    Faulty.planner = staticmethod(planner)
    with pytest.raises(AssertionError, match=message):
        run_state_machine_as_test(Faulty, settings=PLANTED)


def test_what_can_never_be_loaded_is_an_error_at_the_start() -> None:
    uses = list(Fleet(plan_memory).uses.values())
    check_budget(BUDGET, uses)
    with pytest.raises(ConfigError, match="'pinned' and 'big' together need") as error:
        check_budget(17, uses)
    assert "pin fewer" in error.value.hint


def test_shared_weights_count_once() -> None:
    uses = Fleet(plan_memory).uses
    assert total_bytes([uses["other"].footprint, uses["twin"].footprint]) == 5 + 2 + 3
