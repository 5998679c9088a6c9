"""Follows the load of a deployment with the number of its replicas."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import replace

from ingot.core.log import logger
from ingot.serving.fleet.autoscaler import AutoscalerConfig, LoadSample, desired_replicas
from ingot.serving.workers.replicas import ReplicaSet

SAMPLE_S = 1.0
"""Seconds between two samples of the load."""
_log = logger(__name__)


class Autoscaler:
    """Keeps the number of replicas at what `desired_replicas` says.

    What a replica takes to start is measured.
    """

    def __init__(self, replicas: ReplicaSet, config: AutoscalerConfig) -> None:
        self._replicas, self._config = replicas, config
        self._samples: deque[LoadSample] = deque()

    async def run(self) -> None:
        """Follow the load until cancelled."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            if self._replicas.ready:
                self.update(time.monotonic())

    def update(self, now: float) -> None:
        """Sample the load, and start or drain replicas."""
        replicas, samples = self._replicas, self._samples
        sample = replicas.sample_load(now)
        samples.append(sample)
        while len(samples) > 1 and samples[1].at <= now - self._config.cooldown_s:
            samples.popleft()
        startup_s = replicas.startup_s or self._config.startup_s
        desired = desired_replicas(replace(self._config, startup_s=startup_s), samples)
        if desired != sample.num_replicas:
            _log.info(
                "%d replicas instead of %d: queue delay %.2f s, %.0f %% of the KV cache used",
                *(desired, sample.num_replicas, sample.queue_delay_s, 100 * sample.kv_use),
            )
            replicas.resize(desired)
