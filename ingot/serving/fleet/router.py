"""Router: decides which replica of the engine gets a request.

**Load.** A replica's load is in tokens: those of prompts that it has yet to compute, and
`SEQUENCE_TOKENS` for each of its requests, waiting or running. A request's prompt counts without
the prefix that is cached there, and no longer once its first token arrived.

**Policies.** All choose a minimum; of equal replicas, the least recently chosen:

    round-robin     no criterion: the least recently chosen replica
    least-loaded    load
    prefix          load - PREFIX_WEIGHT * cached tokens of the prompt; before that, the replica
                    of the request's session

So the prefix policy sends a request to a replica that has its prefix, unless that one is
overloaded: another one has less load, by more than the weighted prefix. Then the other one computes
the prefix, too, and a prefix in demand spreads over as many replicas as it needs. A session stays
on its replica unless that has over `overload_tokens` more load than the least loaded one.

**Which replica has which blocks** is what the router sent there: a map from block keys (those of
the scheduler) to replicas. The map holds as many keys as all replicas have blocks; the least
recently used are dropped, as the replicas do.

**Pure.** The router reads no clock and uses no random numbers: its choices are a function of the
calls since the start. A request has one owner from `choose` until `finish`; `lose` returns those
of a replica that died, to be chosen for again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError
from ingot.serving.engine.blocks import block_key, root_key
from ingot.serving.engine.request import AnyRequest, Request
from ingot.serving.engine.scheduler import SchedulerConfig

# Not critical: with 16, 64 and 256, simulated TTFT p50 is 0.051, 0.053 and 0.055 s, and prefix hits
# are within half a percent (20 replicas at 13 requests/s each, one seed).
SEQUENCE_TOKENS = 64
# A cached token saves more than its own computation: a second copy of a prefix takes the memory of
# another one. With prefixes that fill the caches of all replicas, 3 instead of 1 lowers TTFT p90
# from 1.09 to 0.27 s (20 replicas, 600 prefixes of 1,024 tokens); with few and short ones it raises
# it from 0.086 to 0.092 s.
PREFIX_WEIGHT = 3


RouterPolicy: TypeAlias = Literal["prefix", "least-loaded", "round-robin"]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Settings of the router."""

    policy: RouterPolicy = "prefix"
    overload_tokens: int = 4096
    """Load above that of the least loaded replica at which a session moves: raise it if sessions
    lose their cached prefixes, lower it if they wait while other replicas are idle."""

    def __post_init__(self) -> None:
        check_bounds(self, overload_tokens=(0, 2**31))
        if self.policy not in get_args(RouterPolicy):
            hint = f"give one of {', '.join(get_args(RouterPolicy))}"
            raise ConfigError(f"policy is {self.policy!r}", hint=hint)


class _Outstanding:
    """A request that a replica has, and what it adds to the replica's load."""

    __slots__ = ("prompt_tokens", "replica")

    def __init__(self, replica: int, prompt_tokens: int) -> None:
        self.replica, self.prompt_tokens = replica, prompt_tokens


class Router:
    """Chooses replicas, and keeps account of their load and of the blocks they have computed.

    >>> router = Router(SchedulerConfig(num_blocks=8, block_size=2))
    >>> router.add(0), router.add(1)
    (None, None)
    >>> router.choose(Request(id=1, prompt=(5, 6, 7), max_tokens=9))
    0
    >>> router.choose(Request(id=2, prompt=(8, 9), max_tokens=9))
    1
    >>> router.loads == {0: 3 + SEQUENCE_TOKENS, 1: 2 + SEQUENCE_TOKENS}
    True
    >>> router.owner(2), router.lose(0), router.owner(1)
    (1, [1], None)
    >>> router.choose(Request(id=1, prompt=(5, 6, 7), max_tokens=9))
    1
    """

    def __init__(self, scheduler: SchedulerConfig, config: RouterConfig | None = None) -> None:
        self.scheduler, self.config = scheduler, config or RouterConfig()
        self.loads: dict[int, int] = {}  # of all replicas, drained ones included
        self._active: OrderedDict[int, None] = OrderedDict()  # the least recently chosen first
        self._outstanding: dict[int, _Outstanding] = {}  # by request, in the order of `choose`
        self._blocks: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()  # key -> replicas
        self._sessions: OrderedDict[str, int] = OrderedDict()

    # Replicas

    @property
    def num_active(self) -> int:
        """Number of replicas that get requests."""
        return len(self._active)

    def add(self, replica: int) -> None:
        """Send requests to a new replica, or again to one that was drained."""
        self.loads.setdefault(replica, 0)
        self._active.setdefault(replica)

    def drain(self, replica: int) -> None:
        """Send no more requests to a replica; it keeps those it has."""
        self._active.pop(replica, None)

    def lose(self, replica: int) -> list[int]:
        """Forget a replica; return the ids of its requests, which no replica owns now."""
        self.drain(replica)
        self.loads.pop(replica, None)
        lost = [id for id, request in self._outstanding.items() if request.replica == replica]
        for id in lost:
            del self._outstanding[id]
        for key, holders in list(self._blocks.items()):
            if holders == (replica,):
                del self._blocks[key]
            elif replica in holders:
                self._blocks[key] = tuple(other for other in holders if other != replica)
        for session, owner in list(self._sessions.items()):
            if owner == replica:
                del self._sessions[session]
        self._drop_oldest()
        return lost

    # Requests

    def choose(self, request: AnyRequest, session: str = "") -> int | None:
        """Return the replica that owns the request from now on; None if there is none to choose.

        Requests of a session, a conversation for example, have the same name; "" is none.
        """
        if request.id in self._outstanding:
            raise ValueError(f"request {request.id} has a replica already")
        if not self._active:
            return None
        cached: dict[int, int] = {}
        if self.config.policy == "round-robin":
            replica = next(iter(self._active))
        elif self.config.policy == "least-loaded":
            replica = self._least_loaded()
        else:
            assert isinstance(request, Request)
            keys = self._block_keys(request)
            cached = self._find_cached(request, keys)
            replica = self._prefer(cached, session)
            self._remember(keys, replica, session)
        prompt_tokens = request.num_tokens - cached.get(replica, 0)
        self._outstanding[request.id] = _Outstanding(replica, prompt_tokens)
        self.loads[replica] += prompt_tokens + SEQUENCE_TOKENS
        self._active.move_to_end(replica)
        return replica

    def owner(self, id: int) -> int | None:
        """Return the replica of a request; None if it has none, or has finished."""
        request = self._outstanding.get(id)
        return None if request is None else request.replica

    def start_decoding(self, id: int) -> None:
        """The first token of a request arrived: its prompt is computed."""
        request = self._outstanding[id]
        self.loads[request.replica] -= request.prompt_tokens
        request.prompt_tokens = 0

    def finish(self, id: int) -> None:
        """A request finished, for whatever reason."""
        request = self._outstanding.pop(id)
        self.loads[request.replica] -= request.prompt_tokens + SEQUENCE_TOKENS

    # The prefix policy

    def _least_loaded(self) -> int:
        return min(self._active, key=self.loads.__getitem__)  # the first of equal ones

    def _prefer(self, cached: dict[int, int], session: str) -> int:
        """Choose the replica of the session, one with a cached prefix, or the least loaded."""
        loads, least = self.loads, self._least_loaded()
        owner = self._sessions.get(session)
        if owner in self._active and loads[owner] <= loads[least] + self.config.overload_tokens:
            return owner
        if not cached:
            return least
        cached.setdefault(least, 0)
        candidates = [replica for replica in self._active if replica in cached]
        return min(candidates, key=lambda r: loads[r] - PREFIX_WEIGHT * cached[r])

    def _block_keys(self, request: Request) -> list[bytes]:
        """Return the keys of the full blocks of the prompt, as the scheduler computes them."""
        size, tokens = self.scheduler.block_size, request.tokens
        key = root_key(request.adapter, self.scheduler.model_version, request.cache_salt)
        keys: list[bytes] = []
        for start in range(0, len(tokens) - size + 1, size):
            key = block_key(key, tokens[start : start + size])
            keys.append(key)
        return keys

    def _find_cached(self, request: Request, keys: list[bytes]) -> dict[int, int]:
        """Return the cached tokens of the prompt, for each replica that has any."""
        size, limit = self.scheduler.block_size, len(request.tokens) - 1
        if request.max_cached_tokens is not None:
            limit = min(limit, request.max_cached_tokens)
        cached: dict[int, int] = {}
        active, num_tokens = self._active, 0
        previous: tuple[int, ...] = ()
        holders: set[int] = set()  # of all blocks so far
        for key in keys[: limit // size]:
            held = self._blocks.get(key, ())
            if held != previous:
                remaining = {r for r in held if r in (holders if num_tokens else active)}
                cached.update(dict.fromkeys(holders - remaining, num_tokens))
                holders, previous = remaining, held
            if not holders:
                return cached
            num_tokens += size
        return cached | dict.fromkeys(holders, num_tokens)

    def _remember(self, keys: list[bytes], replica: int, session: str) -> None:
        for key in reversed(keys):  # the last block is dropped first
            holders = self._blocks.get(key, ())
            if replica not in holders:
                self._blocks[key] = (*holders, replica)
            self._blocks.move_to_end(key)
        if session:
            self._sessions[session] = replica
            self._sessions.move_to_end(session)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Keep as many blocks, and sessions, as all replicas have blocks."""
        limit = self.scheduler.num_blocks * len(self.loads)
        for entries in (self._blocks, self._sessions):
            while len(entries) > limit:
                entries.popitem(last=False)
