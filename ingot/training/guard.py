"""Detection of divergence: losses or gradients that are not finite, and loss spikes.

The baseline is the median of the last `window` losses, and its spread their median absolute
deviation (MAD), which a spike does not move. Scaled to the standard deviation of normal noise,

    z = (loss - median) / (1.4826 MAD)

A loss with z above `z_threshold` is a spike. The spread is taken to be at least 1 % of the median
and 0.0001, so that small fluctuations on a plateau are not spikes, nor are losses next to 0 where
the task is solved. Falling losses never are.

The policy decides what happens next: `stop` ends the run, `skip` skips the batch, `rollback`
restores the weights of the latest checkpoint and continues with the data after the batch (Chowdhery
et al. 2022). More than `patience` such batches within `window` steps end the run under every
policy, because skipping batches does not help then.
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

_MIN_LOSSES = 10  # losses needed before a spike can be detected
_MAD_TO_STD = 1.4826
_MIN_SPREAD = 1e-4  # nats: of a loss that is 0, any other would be a spike


@dataclass(frozen=True, kw_only=True)
class SpikeGuardConfig:
    """When a loss is a spike, and what the trainer does then.

    >>> SpikeGuardConfig(policy="skip").window
    100
    """

    policy: Literal["stop", "skip", "rollback"] = "stop"
    """End the run, skip the batch, or restore the latest checkpoint and continue after it."""
    z_threshold: float = 20.0
    """Deviations above the median at which a loss is a spike; noise alone stays below 6."""
    window: int = 100
    """Number of recent losses to compare with."""
    patience: int = 5
    """Bad batches within `window` steps that are tolerated before the run ends."""

    def __post_init__(self) -> None:
        check_bounds(self, z_threshold=(1.0, 1e6), window=(_MIN_LOSSES, 10**5), patience=(0, 10**5))


class Diverged(IngotError):
    """A run that was stopped because of its losses or gradients."""


class SpikeDetector:
    """Detects bad losses and gradients of one run.

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
        """Return why this step must not be applied, or None; a good loss joins the baseline."""
        self._seen += 1
        found = self._find_reason(loss, norm)
        if found is None:
            self._losses.append(loss)
        else:
            self._bad.append(self._seen)
        return found

    @property
    def exhausted(self) -> bool:
        """Whether there were more than `patience` bad batches within the window."""
        while self._bad and self._bad[0] <= self._seen - self.guard.window:
            self._bad.popleft()
        return len(self._bad) > self.guard.patience

    def _find_reason(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"a loss of {loss}"
        if not math.isfinite(norm):
            return f"a gradient norm of {norm}"
        if len(self._losses) < _MIN_LOSSES:
            return None
        median = statistics.median(self._losses)
        spread = _MAD_TO_STD * statistics.median(abs(x - median) for x in self._losses)
        if loss - median > self.guard.z_threshold * max(spread, 0.01 * abs(median), _MIN_SPREAD):
            return f"a loss of {loss:.4g} where {median:.4g} is usual"
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-compatible values."""
        return {"losses": list(self._losses), "bad": list(self._bad), "seen": self._seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._losses = deque(state["losses"], maxlen=self.guard.window)
        self._bad, self._seen = deque(state["bad"]), int(state["seen"])


def bad_batch_path(directory: Path, step: int) -> Path:
    """Return the file with the sample ids of the bad batch of this step."""
    return directory / "bad_batches" / f"step-{step:08}.json"


def dump_bad_batch(path: Path, *, step: int, reason: str, sample_ids: Sequence[int]) -> None:
    """Write the sample ids of a bad batch."""
    content = {"step": step, "reason": reason, "sample_ids": [int(i) for i in sample_ids]}
    write_atomic(path, json.dumps(content) + "\n")
