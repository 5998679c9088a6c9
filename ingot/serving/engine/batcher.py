"""Dynamic batching: which waiting requests are the next batch, and when it is computed.

A batch is closed

- when it is full: `max_batch_size` rows wait;
- when a request has waited for `max_queue_delay`;
- when waiting longer would endanger a deadline: the time that a batch takes is left before it, and
  at least half of the time that the request had.

Requests are taken by deadline, which is the order of their arrival where all have the same timeout.
A request is never divided. Nothing here reads a clock or imports torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ingot.core.config import check_bounds
from ingot.core.errors import IngotError


@dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """Limits of a batch; the names are those of Triton Inference Server.

    >>> BatchingConfig().max_batch_size
    64
    """

    max_batch_size: int = 64
    """Maximum number of rows."""
    max_queue_delay: float = 0.005
    """Seconds that a request may wait for others; 0 to compute at once what waits."""

    def __post_init__(self) -> None:
        check_bounds(self, max_batch_size=(1, 1 << 16), max_queue_delay=(0.0, 10.0))


@dataclass(frozen=True)
class _Waiting:
    id: int
    rows: int
    arrival: float
    deadline: float


class Batcher:
    """Requests that wait to be computed.

    >>> batcher = Batcher(BatchingConfig(max_batch_size=4, max_queue_delay=0.005))
    >>> batcher.add(1, rows=2, now=0.0)
    >>> batcher.add(2, rows=1, now=0.001, deadline=0.004)
    >>> batcher.due_at(batch_s=0.002)  # request 2 has to be computed by 0.004
    0.002
    >>> batcher.take()
    [2, 1]
    """

    def __init__(self, config: BatchingConfig) -> None:
        self.config = config
        self._waiting: dict[int, _Waiting] = {}
        self._rows = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, id: int) -> bool:
        return id in self._waiting

    def add(self, id: int, *, rows: int, now: float, deadline: float | None = None) -> None:
        """Queue a request; raise an error for one that is larger than a batch."""
        limit = self.config.max_batch_size
        if not 1 <= rows <= limit:
            raise IngotError(
                f"a request may have 1 to {limit} rows, got {rows}",
                hint="send several requests, or raise --max-batch-size of `ingot serve`",
            )
        self._waiting[id] = _Waiting(id, rows, now, math.inf if deadline is None else deadline)
        self._rows += rows

    def remove(self, id: int) -> bool:
        """Remove a request; return whether it was waiting."""
        request = self._waiting.pop(id, None)
        self._rows -= request.rows if request else 0
        return request is not None

    def due_at(self, batch_s: float) -> float:
        """Return when the next batch has to be computed, if a batch takes `batch_s` seconds.

        It is in the past for a full batch, and infinite if nothing waits.
        """
        if self._rows >= self.config.max_batch_size:
            return -math.inf
        delay = self.config.max_queue_delay
        times = (
            min(one.arrival + delay, (one.arrival + one.deadline) / 2, one.deadline - batch_s)
            for one in self._waiting.values()
        )
        return min(times, default=math.inf)

    def take(self) -> list[int]:
        """Remove the next batch from the queue and return its requests, at least one if any waits.

        A request that does not fit ends the batch: smaller ones do not pass it.
        """
        batch: list[_Waiting] = []
        left = self.config.max_batch_size
        for one in sorted(self._waiting.values(), key=lambda one: (one.deadline, one.arrival)):
            left -= one.rows
            if left < 0:
                break
            batch.append(one)
        for one in batch:
            self.remove(one.id)
        return [one.id for one in batch]
