"""How a run is divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError

Schedule = Literal["1f1b", "interleaved_1f1b", "interleaved_zero_bubble"]


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a run is divided among ranks; their number is that of the processes started.

    >>> ParallelConfig(dp=2).batch_shards
    """

    dp: int = 1
    """Replicas of the model; the ranks of a replica shard its weights (FSDP)."""
    pp: int = 1
    """Ranks of the pipeline, each with a part of the layers."""
    schedule: Schedule = "1f1b"
    """Order of forwards and backwards in a pipeline. The interleaved ones give each rank two parts
    of the layers, so that it waits less; "interleaved_zero_bubble" also computes gradients of
    weights where it would wait."""
    ep: int = 1
    """Ranks among which the experts of a layer are divided: those that shard the weights of a
    replica. With 1, the weights of experts are gathered, as all others are."""
    cp: int = 1
    """Ranks that divide the tokens of each micro-batch, for long sequences. They shard weights,
    too."""
    tp: int = 1
    """Ranks that compute each matrix multiplication together."""
    batch_shards: int | None = None
    """Parts of the global batch whose gradients are summed pairwise, a power of two. Any number of
    ranks that divides it computes the same bits. By default the largest up to 8 that divides
    `grad_accum_steps`."""

    timeout_s: float = 600.0
    """Seconds after which a rank that does not answer ends the run, or restarts it."""

    def __post_init__(self) -> None:
        check_bounds(self, dp=(1, 2**20), ep=(1, 2**20), timeout_s=(1.0, 1e6))
        check_bounds(self, pp=(1, 2**10), cp=(1, 2**10), tp=(1, 2**10))
        self._check_combinations()
        shards = 1 if self.batch_shards is None else self.batch_shards
        if shards < 1 or shards & (shards - 1):
            raise ConfigError(
                f"parallel.batch_shards: must be a power of two, got {shards}",
                hint="give 1, 2, 4 or a larger one",
            )

    def _check_combinations(self) -> None:
        for first, second in (("cp", "pp"), ("cp", "tp"), ("cp", "ep"), ("ep", "pp"), ("ep", "tp")):
            if getattr(self, first) > 1 and getattr(self, second) > 1:
                raise ConfigError(
                    f"parallel.{first} and parallel.{second} cannot be combined yet",
                    hint="set one of them to 1: other ranks shard the weights (FSDP)",
                )
