"""Divergence is never silent: a loss or gradient that is not finite, or far above the usual.

The usual is the median of the last `window` losses, and its spread their median deviation from it
(MAD): a spike moves neither. Scaled so that it is a standard deviation for normal noise,

    z = (loss - median) / (1.4826 MAD)

A loss above `z` of these is a spike. The spread counts as at least 1 % of the median, or a plateau
would make a spike of every wobble. Falling losses are never one.

What happens then is the policy: `stop` ends the run, `skip` leaves out the batch, `rollback` goes
back to the newest checkpoint's weights and on with the data behind the batch (Chowdhery et al.
2022). More than `patience` such batches in `window` steps end the run under every policy: something
is wrong that leaving out batches does not cure.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ingot.core.config import check_bounds
from ingot.core.errors import IngotError
from ingot.core.paths import write_atomic

_LEAST = 10  # losses before one can be said to be unusual
_NORMAL = 1.4826


@dataclass(frozen=True, kw_only=True)
class SpikeGuardConfig:
    """What counts as divergence, and what follows.

    >>> SpikeGuardConfig(policy="skip").window
    100
    """

    policy: Literal["stop", "skip", "rollback"] = "stop"
    z_threshold: float = 20.0
    """How many deviations above the median a loss is a spike; noise alone stays below 6."""
    window: int = 100
    patience: int = 5

    def __post_init__(self) -> None:
        check_bounds(self, z_threshold=(1.0, 1e6), window=(_LEAST, 10**5), patience=(0, 10**5))


class Diverged(IngotError):
    """A run that was ended since its loss or its gradients were not what they should be."""


class SpikeDetector:
    """The guard of one run.

    >>> detector = SpikeDetector(SpikeGuardConfig(window=10))
    >>> [detector.check(2.0 + 0.1 * (step % 3), 1.0) for step in range(10)][-1]
    >>> detector.check(9.0, 1.0)
    'a loss of 9 where 2.1 is usual'
    >>> detector.check(2.0, math.inf)
    'a gradient norm of inf'
    """

    def __init__(self, guard: SpikeGuardConfig) -> None:
        self.guard = guard
        self._losses: deque[float] = deque(maxlen=guard.window)
        self._bad: deque[int] = deque()
        self._seen = 0

    def check(self, loss: float, norm: float) -> str | None:
        """Why this step must not be made; None if it may. A good loss becomes part of the usual."""
        self._seen += 1
        found = self._find_reason(loss, norm)
        if found is None:
            self._losses.append(loss)
        else:
            self._bad.append(self._seen)
        return found

    @property
    def exhausted(self) -> bool:
        """Whether there were more bad batches lately than patience."""
        while self._bad and self._bad[0] <= self._seen - self.guard.window:
            self._bad.popleft()
        return len(self._bad) > self.guard.patience

    def _find_reason(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"a loss of {loss}"
        if not math.isfinite(norm):
            return f"a gradient norm of {norm}"
        if len(self._losses) < _LEAST:
            return None
        median = statistics.median(self._losses)
        spread = _NORMAL * statistics.median(abs(x - median) for x in self._losses)
        if loss - median > self.guard.z_threshold * max(spread, 0.01 * abs(median)):
            return f"a loss of {loss:.4g} where {median:.4g} is usual"
        return None

    def state_dict(self) -> dict[str, Any]:
        """What the next verdicts depend on, as JSON can hold it."""
        return {"losses": list(self._losses), "bad": list(self._bad), "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that `state_dict` gave in another process."""
        self._losses = deque(state["losses"], maxlen=self.guard.window)
        self._bad, self._seen = deque(state["bad"]), int(state["seen"])


def dump_bad_batch(directory: Path, *, step: int, reason: str, sample_ids: Sequence[int]) -> Path:
    """Write which samples a bad batch was made of; returns the file."""
    path = directory / "bad_batches" / f"step-{step:08}.json"
    content = {"step": step, "reason": reason, "sample_ids": [int(i) for i in sample_ids]}
    write_atomic(path, json.dumps(content) + "\n")
    return path
