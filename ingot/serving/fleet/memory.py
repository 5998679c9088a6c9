"""Memory of a fleet: which deployments to load and to unload, under a budget.

Models are loaded when requests ask for them. The deployments that requests wait for form a queue,
served in order:

- A deployment is **loaded** if it fits into the budget with all that have a process, including one
  that is still loading or unloading. Two deployments of the same weights share their memory.
- Otherwise others are **unloaded**, the least recently used first, and no more of them than needed.
  Pinned ones stay, and so do those with requests in flight.
- If all idle ones are not enough, the least recently used of the busy ones are **held**: their
  requests finish, new ones join the queue. So a model is loaded at last, however busy others are.

Nothing here reads a clock: `last_use` is any number that grows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ingot.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory of a deployment in bytes.

    >>> Footprint(weights="a", weights_bytes=10, private_bytes=3).total
    13
    """

    weights: str
    """Identity of the weights: those of two deployments with the same one are in memory once."""
    weights_bytes: int
    private_bytes: int
    """KV cache and process."""

    @property
    def total(self) -> int:
        """Bytes of the deployment alone."""
        return self.weights_bytes + self.private_bytes


@dataclass(frozen=True, kw_only=True)
class DeploymentUse:
    """What the budget has to know of a deployment."""

    name: str
    footprint: Footprint
    is_loaded: bool
    """Whether it has a process, in whatever state."""
    is_ready: bool
    """Whether it can be unloaded: it is not loading or unloading."""
    is_unloading: bool = False
    pinned: bool = False
    num_requests: int = 0
    """Requests in flight."""
    last_use: float = 0.0
    """When it got its last request."""


class MemoryPlan(NamedTuple):
    """What to do now."""

    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()
    hold: tuple[str, ...] = ()
    """Ready deployments that get no new requests, because memory is needed for others."""


def total_bytes(footprints: Iterable[Footprint]) -> int:
    """Return the memory of deployments that are loaded together.

    >>> one = Footprint(weights="a", weights_bytes=10, private_bytes=3)
    >>> total_bytes([one, one])
    16
    """
    weights: dict[str, int] = {}
    private = 0
    for footprint in footprints:
        weights[footprint.weights] = footprint.weights_bytes
        private += footprint.private_bytes
    return sum(weights.values()) + private


def check_budget(budget: int, deployments: Collection[DeploymentUse]) -> None:
    """Require that the pinned deployments fit into the budget together with any other one.

    >>> small = Footprint(weights="a", weights_bytes=2 << 30, private_bytes=1 << 30)
    >>> use = DeploymentUse(name="a", footprint=small, is_loaded=False, is_ready=False)
    >>> check_budget(2 << 30, [use])
    Traceback (most recent call last):
    ...
    ingot.core.errors.ConfigError: 'a' needs 3.00 GiB, memory_gib is 2.00
      hint: raise memory_gib, or lower the kv_cache_gib of deployments
    """
    pinned = [one for one in deployments if one.pinned]
    hint = "raise memory_gib, or lower the kv_cache_gib of deployments"
    for one in deployments:
        together = {use.name: use.footprint for use in (*pinned, one)}
        needed = total_bytes(together.values())
        if needed > budget:
            names = " and ".join(f"'{name}'" for name in together)
            verb = "needs" if len(together) == 1 else "together need"
            if len(pinned) > 0:
                hint = "raise memory_gib, pin fewer deployments, or lower their kv_cache_gib"
            raise ConfigError(
                f"{names} {verb} {needed / 2**30:.2f} GiB, memory_gib is {budget / 2**30:.2f}",
                hint=hint,
            )


def plan_memory(
    budget: int, deployments: Sequence[DeploymentUse], queue: Sequence[str]
) -> MemoryPlan:
    """Return what to load, unload and hold for a queue of deployments that requests wait for.

    >>> def use(name, **fields):
    ...     size = Footprint(weights=name, weights_bytes=4, private_bytes=1)
    ...     return DeploymentUse(name=name, footprint=size, **fields)
    >>> a = use("a", is_loaded=True, is_ready=True, last_use=7.0)
    >>> b = use("b", is_loaded=True, is_ready=True, last_use=5.0)
    >>> c = use("c", is_loaded=False, is_ready=False)
    >>> plan_memory(15, [a, b, c], ["c"])
    MemoryPlan(load=('c',), unload=(), hold=())
    >>> plan_memory(10, [a, b, c], ["c"])
    MemoryPlan(load=(), unload=('b',), hold=())
    """
    uses = {one.name: one for one in deployments}
    present = {name for name, one in uses.items() if one.is_loaded}
    load: list[str] = []
    for at, name in enumerate(queue):
        if name in present and not uses[name].is_unloading:
            continue
        if name not in present and _fits(budget, uses, {*present, name}):
            present.add(name)
            load.append(name)
            continue
        # Those before it in the queue have been asked for, too: their requests run first.
        candidates = [
            one
            for one in deployments
            if one.is_ready and not one.pinned and one.name not in queue[: at + 1]
        ]
        unload, hold = _victims(budget, uses, present, name, candidates)
        return MemoryPlan(tuple(load), unload, hold)
    return MemoryPlan(tuple(load))


def _victims(
    budget: int,
    uses: dict[str, DeploymentUse],
    present: set[str],
    name: str,
    candidates: list[DeploymentUse],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the idle and the busy deployments that have to make room for one."""
    remaining = {one for one in present if not uses[one].is_unloading} | {name}
    order = sorted(candidates, key=lambda one: (one.num_requests > 0, one.last_use))
    chosen: list[DeploymentUse] = []
    for one in order:
        if _fits(budget, uses, remaining):
            break
        chosen.append(one)
        remaining.discard(one.name)
    if not _fits(budget, uses, remaining):
        return (), ()  # until one that is loading can be chosen, too
    for one in reversed(chosen):
        if _fits(budget, uses, {*remaining, one.name}):
            remaining.add(one.name)
    victims = [one for one in chosen if one.name not in remaining]
    idle = tuple(one.name for one in victims if not one.num_requests)
    return idle, tuple(one.name for one in victims if one.num_requests)


def _fits(budget: int, uses: dict[str, DeploymentUse], names: set[str]) -> bool:
    return total_bytes(uses[name].footprint for name in names) <= budget
