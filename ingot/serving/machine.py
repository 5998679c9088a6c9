"""The machine of a simulated server: processes that share its cores.

**Sharing.** Processes that compute share the cores in proportion to their weights, and none gets
more than one core; engines have a lower weight. All of a class advance alike, so a work
of s seconds ends when the *virtual time* of its class, which passes at that speed, has advanced by
s. A work that begins or ends changes the speeds, but not the virtual time at which others end: they
stay in a heap (generalized processor sharing, as in fair queueing).

**Processes around the engines.** The HTTP process parses requests and chooses replicas, and writes
an event for each token; a load generator, if it runs on the same machine, sends and reads them.
Each is busy with one thing at a time, in the order in which they came (`Process`). While it is
busy it need not wake up for what comes next: outputs that wait are read together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TypeAlias

from ingot.core.config import check_bounds

Action: TypeAlias = Callable[[], None]

ENGINE_WEIGHT = 110 / 1024
"""Relative to the others: Linux's weight of niceness 10, which engines have."""


@dataclass(frozen=True, kw_only=True)
class ProcessCosts:
    """CPU time that a process in front of the engines takes.

    >>> ProcessCosts(request_s=1e-3, token_s=1e-4).outputs_seconds(20)
    0.002
    """

    wakeup_s: float = 0.0
    """Seconds to wake up for a request or for outputs, if it was idle before."""
    request_s: float = 0.0
    """Seconds for a request."""
    prompt_token_s: float = 0.0
    """Seconds for each token of its prompt."""
    token_s: float = 0.0
    """Seconds for each token of the outputs."""

    def __post_init__(self) -> None:
        bounds = (0, 1e3)
        check_bounds(self, **dict.fromkeys(vars(self), bounds))

    def request_seconds(self, num_prompt_tokens: int) -> float:
        """Return the seconds for a request, without waking up."""
        return self.request_s + num_prompt_tokens * self.prompt_token_s

    def outputs_seconds(self, num_tokens: int) -> float:
        """Return the seconds for the outputs of a step, without waking up."""
        return num_tokens * self.token_s


@dataclass(frozen=True, kw_only=True)
class MachineConfig:
    """The machine that the replicas run on. By default only their steps take time."""

    cores: int | None = None
    """Cores that all processes share; None if each has one of its own."""
    server: ProcessCosts = field(default_factory=ProcessCosts)
    """Of the HTTP process."""
    clients: ProcessCosts = field(default_factory=ProcessCosts)
    """Of a load generator on the same machine."""

    def __post_init__(self) -> None:
        if self.cores is not None:
            check_bounds(self, cores=(1, 10**6))

    @property
    def has_processes(self) -> bool:
        """Whether anything in front of the engines takes time."""
        return any([*vars(self.server).values(), *vars(self.clients).values()])


class SharedCores:
    """Works in progress on the cores.

    >>> cores, ended = SharedCores(cores=1), []
    >>> cores.begin(0.0, 1.0, lambda: ended.append("short"))
    >>> cores.begin(0.0, 3.0, lambda: ended.append("long"))
    >>> cores.next_end
    2.0
    >>> cores.pop()()
    >>> cores.next_end, ended
    (4.0, ['short'])
    """

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._engines, self._others = _WorkClass(), _WorkClass()
        self._num_begun = 0
        self._now = 0.0
        self.next_end = math.inf
        """When the next work ends if none begins before."""

    def begin(self, now: float, seconds: float, action: Action, *, is_engine: bool = False) -> None:
        """Begin a work; `action` is for the caller of `pop`."""
        self._advance(now)
        self._num_begun += 1
        works = self._engines if is_engine else self._others
        heappush(works.heap, (works.virtual_now + seconds, self._num_begun, action))
        self._update()

    def pop(self) -> Action:
        """Return the action of the work that ends at `next_end`."""
        self._advance(self.next_end)
        engines, others = self._engines, self._others
        works = engines if engines.seconds_left < others.seconds_left else others
        _, _, action = heappop(works.heap)
        self._update()
        return action

    def _advance(self, now: float) -> None:
        for works in (self._engines, self._others):
            works.virtual_now += (now - self._now) * works.speed
        self._now = now

    def _update(self) -> None:
        engines, others = self._engines, self._others
        engines.speed, others.speed = speeds(self._cores, len(engines.heap), len(others.heap))
        self.next_end = self._now + max(0.0, min(engines.seconds_left, others.seconds_left))


@dataclass
class _WorkClass:
    """Works that advance at the same speed."""

    heap: list[tuple[float, int, Action]] = field(default_factory=list[tuple[float, int, Action]])
    """By the virtual time at which they end."""
    virtual_now: float = 0.0
    speed: float = 1.0

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the next one ends at this speed."""
        return (self.heap[0][0] - self.virtual_now) / self.speed if self.heap else math.inf


def speeds(cores: int, engines: int, others: int) -> tuple[float, float]:
    """Return the share of a core that each engine and each other process gets.

    >>> speeds(2, 4, 0), speeds(2, 4, 1)
    ((0.5, 1.0), (0.25, 1.0))
    """
    if engines + others <= cores:
        return 1.0, 1.0
    share = cores / (others + ENGINE_WEIGHT * engines)
    if share >= 1:  # the others have a core each
        return (cores - others) / engines, 1.0
    return ENGINE_WEIGHT * share, share


class Process:
    """A process that does one thing at a time, in the order of `submit`."""

    def __init__(self, begin: Callable[[float, Action], None], wakeup_s: float = 0.0) -> None:
        """`begin(seconds, action)` starts a work, and calls the action when it has ended."""
        self._begin, self._wakeup_s = begin, wakeup_s
        self._queue: deque[tuple[float, Action]] = deque()

    def submit(self, seconds: float, action: Action) -> None:
        """Compute for `seconds`, then do `action`; at once, if it takes no time."""
        if not self._queue:
            seconds += self._wakeup_s
        if seconds <= 0 and not self._queue:
            action()
            return
        self._queue.append((seconds, action))
        if len(self._queue) == 1:
            self._begin(seconds, self._end)

    def _end(self) -> None:
        _, action = self._queue.popleft()
        if self._queue:
            self._begin(self._queue[0][0], self._end)
        action()
