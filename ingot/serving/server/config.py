"""Settings of the server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError
from ingot.serving.engine.batcher import BatchingConfig
from ingot.serving.fleet.autoscaler import AutoscalerConfig


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the server.

    >>> ServerConfig().port
    8000
    """

    host: str = "127.0.0.1"
    port: int = 8000
    """0 for any free port."""
    admin_host: str = "127.0.0.1"
    admin_port: int = 9000
    device: str = "auto"
    """Device of the engine: "auto", "cpu", "cuda:0"..."""
    tp: int = 1
    """Number of ranks that the layers are divided among (tensor parallelism)."""
    replicas: int = 1
    """Engine processes; requests of one that dies continue on another."""
    autoscale: AutoscalerConfig | None = None
    """Bounds and targets of the number of replicas; None for `replicas` at all times."""
    ray: bool = False
    """Whether the replicas run on a Ray cluster instead of this machine."""
    max_requests: int = 256
    """Maximum concurrent requests; further ones are rejected with 429."""
    timeout: float = 600.0
    """Seconds after which a request fails."""
    stall_timeout: float = 60.0
    """Seconds without a completed step, with requests outstanding, until the engine restarts."""
    drain_timeout: float = 30.0
    """Seconds that running requests have to finish at shutdown."""
    kv_cache_bytes: int | None = None
    """Of each replica."""
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    """Dtype of cached keys and values; "auto" is that of the model."""
    speculate: Literal["ngram", "int4"] | None = None
    adapters: Mapping[str, Path | str] = field(default_factory=dict[str, "Path | str"])
    """Directories of LoRA adapters by the name that requests give as their `model`."""
    max_loras: int | None = None
    """Maximum number of loaded adapters; by default that of `adapters`."""
    max_lora_rank: int | None = None
    """Maximum rank; by default the largest of `adapters`, at least 16."""
    max_batch_size: int = BatchingConfig.max_batch_size
    """Maximum number of rows of a batch of a classifier."""
    max_queue_delay: float = BatchingConfig.max_queue_delay
    """Seconds that a request to a classifier may wait for others."""
    json_logs: bool = False

    @property
    def min_replicas(self) -> int:
        """The replicas at the start."""
        return self.replicas if self.autoscale is None else self.autoscale.min_replicas

    @property
    def max_replicas(self) -> int:
        """The most replicas that there may be."""
        return self.replicas if self.autoscale is None else self.autoscale.max_replicas

    def __post_init__(self) -> None:
        check_bounds(
            self,
            port=(0, 65535),
            admin_port=(0, 65535),
            tp=(1, 64),
            replicas=(1, 1024),
            max_requests=(1, 100_000),
            timeout=(0.1, 86_400),
            stall_timeout=(0.1, 86_400),
            drain_timeout=(0.0, 86_400),
        )
        BatchingConfig(max_batch_size=self.max_batch_size, max_queue_delay=self.max_queue_delay)
        if self.max_queue_delay >= self.stall_timeout:
            raise ConfigError(
                "max_queue_delay: must be below stall_timeout, which restarts the engine",
                hint="lower --max-queue-delay-ms",
            )
