"""The machine of a simulated server: processes that share its cores.

**Sharing.** If n processes compute on c cores, each of them advances at min(1, c / n) of its speed.
All advance alike, so a work of s seconds ends when the *virtual time*, which passes at that speed,
has advanced by s. A work that begins or ends changes the speed, but not the virtual time at which
others end: they stay in a heap (generalized processor sharing, as in fair queueing).

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
        check_bounds(self, request_s=bounds, prompt_token_s=bounds, wakeup_s=bounds, token_s=bounds)

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
        self._works: list[tuple[float, int, Action]] = []  # a heap; by virtual end
        self._num_begun = 0
        self._now = self._virtual_now = 0.0
        self.next_end = math.inf
        """When the next work ends if none begins before."""

    def begin(self, now: float, seconds: float, action: Action) -> None:
        """Begin a work; `action` is for the caller of `pop`."""
        works = self._works
        if works:
            self._virtual_now += (now - self._now) * min(1.0, self._cores / len(works))
        else:
            self._virtual_now = now
        self._now = now
        self._num_begun += 1
        heappush(works, (self._virtual_now + seconds, self._num_begun, action))
        self._update()

    def pop(self) -> Action:
        """Return the action of the work that ends at `next_end`."""
        self._now = self.next_end
        self._virtual_now, _, action = heappop(self._works)
        self._update()
        return action

    def _update(self) -> None:
        works = self._works
        if not works:
            self.next_end = math.inf
            return
        left = works[0][0] - self._virtual_now
        self.next_end = self._now + left * max(1.0, len(works) / self._cores)


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
