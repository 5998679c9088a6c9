"""Autoscaler: how many replicas a fleet should have, as a function of its recent load.

Replicas are added at once, and removed late:

- **More**, if requests wait longer than `max_queue_delay_s`, in proportion to the delay but at most
  twice as many; or if blocks of the KV cache are used beyond `max_kv_use`, in proportion to it.
  Then `startup_s` pass before more are added: the new ones have to start first.
- **Fewer**, so that the KV cache would be used up to `max_kv_use`, if that was enough at all times
  of the last `cooldown_s`, and the number has not changed in that time.

KV use is proportional to the load; a queue only shows that there are too few replicas, not how many
are too many. The function reads no clock: samples carry their time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class AutoscalerConfig:
    """Bounds and targets of a fleet."""

    min_replicas: int = 1
    """Raise it for availability: the fleet survives the loss of all but one."""
    max_replicas: int = 10
    """What the budget allows."""
    max_queue_delay_s: float = 0.5
    """Delay between arrival and first step. Lower it if TTFT misses its SLO, raise it to save
    replicas."""
    max_kv_use: float = 0.8
    """Used fraction of the KV cache. Lower it if requests are preempted."""
    startup_s: float = 60.0
    """Seconds that a replica takes to start: loading the weights, mostly. Measure it."""
    cooldown_s: float = 600.0
    """Seconds of low load before replicas are removed. Raise it if the number oscillates."""

    def __post_init__(self) -> None:
        check_bounds(
            self,
            min_replicas=(1, 10_000),
            max_replicas=(1, 10_000),
            max_queue_delay_s=(1e-3, 1e6),
            max_kv_use=(0.01, 1),
            startup_s=(0, 1e6),
            cooldown_s=(0, 1e6),
        )
        if self.min_replicas > self.max_replicas:
            raise ConfigError(
                f"min_replicas is {self.min_replicas}, max_replicas {self.max_replicas}",
                hint="raise max_replicas or lower min_replicas",
            )


class LoadSample(NamedTuple):
    """The load of a fleet at a time."""

    at: float
    """Seconds, on any clock."""
    num_replicas: int
    """Replicas that run or start."""
    queue_delay_s: float
    """Of the requests that were admitted since the sample before; their p90, for example."""
    kv_use: float
    """Fraction of the blocks that requests use, over all replicas; cached ones are free."""


def desired_replicas(config: AutoscalerConfig, samples: Sequence[LoadSample]) -> int:
    """Return the number of replicas after these samples, the latest of which is the present.

    >>> config = AutoscalerConfig(cooldown_s=600)
    >>> busy, idle = LoadSample(0.0, 4, 1.5, 0.6), LoadSample(300.0, 8, 0.0, 0.2)
    >>> desired_replicas(config, [busy])
    8
    >>> desired_replicas(config, [busy, idle])
    8
    >>> desired_replicas(config, [idle, idle._replace(at=900.0)])
    2
    """
    if not samples:
        return config.min_replicas
    now, current = samples[-1].at, samples[-1].num_replicas
    changes = [b.at for a, b in pairwise(samples) if a.num_replicas != b.num_replicas]
    changed_at = max(changes, default=-math.inf)
    needed = _needed(config, samples[-1])
    if needed > current and now - changed_at < config.startup_s:
        needed = current
    if needed < current:
        window = [sample for sample in samples if sample.at >= now - config.cooldown_s]
        is_known = samples[0].at <= now - config.cooldown_s
        is_steady = is_known and now - changed_at >= config.cooldown_s
        before = max(_needed(config, sample) for sample in window)
        needed = min(before, current) if is_steady else current
    return max(config.min_replicas, min(config.max_replicas, needed))


def _needed(config: AutoscalerConfig, sample: LoadSample) -> int:
    """Return the replicas for the load of a sample."""
    factor = sample.kv_use / config.max_kv_use
    if sample.queue_delay_s > config.max_queue_delay_s:
        factor = max(factor, min(2.0, sample.queue_delay_s / config.max_queue_delay_s))
    return math.ceil(sample.num_replicas * factor - 1e-9)
