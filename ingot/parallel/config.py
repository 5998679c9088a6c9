"""How a run is divided among ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    tp_bitwise: bool = True
    """Whether the ranks of `tp` compute the bits of a single process. Otherwise they add partial
    sums, as is usual, which sends less."""
    batch_shards: int | None = None
    """Parts of the global batch whose gradients are summed pairwise, a power of two. Any number of
    ranks that divides it computes the same bits. By default the largest up to 8 that divides
    `grad_accum_steps`."""
    grad_compression: Literal["none", "int8"] = "none"
    """How gradients, and the changes of `local_steps`, are sent: as they are, or rounded to int8
    with a scale for each row. A single process rounds them, too."""
    local_steps: int = 1
    """Steps that each of the `dp` replicas takes on its own before they are averaged (DiLoCo); with
    1, their gradients are summed in every step."""
    outer_lr: float = 0.7
    """Learning rate of the average, with `local_steps`."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the average, with `local_steps`."""
    timeout_s: float = 600.0
    """Seconds after which a rank that does not answer ends the run, or restarts it."""

    def __post_init__(self) -> None:
        check_bounds(self, dp=(1, 2**20), ep=(1, 2**20), timeout_s=(1.0, 1e6))
        check_bounds(self, pp=(1, 2**10), cp=(1, 2**10), tp=(1, 2**10))
        check_bounds(self, local_steps=(1, 10**6), outer_lr=(0.0, 10.0), outer_momentum=(0.0, 1.0))
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
        if self.local_steps > 1 and self.dp == 1:
            raise ConfigError(
                "parallel.local_steps: needs several replicas",
                hint="set parallel.dp=2 or more, or parallel.local_steps=1",
            )
        less = {"local_steps": self.local_steps > 1, "grad_compression": self.compresses}
        for name, used in less.items():
            for axis in ("pp", "ep", "cp", "tp"):
                if used and getattr(self, axis) > 1:
                    raise ConfigError(
                        f"parallel.{name} and parallel.{axis} cannot be combined yet",
                        hint=f"set parallel.{axis}=1: other ranks shard the weights (FSDP)",
                    )

    @property
    def compresses(self) -> bool:
        """Whether gradients are rounded to int8."""
        return self.grad_compression == "int8"

    def with_resumable_fields(self, other: ParallelConfig) -> ParallelConfig:
        """Return the layout of another config with what decides the bits of this one's run.

        >>> ParallelConfig(batch_shards=8).with_resumable_fields(ParallelConfig(dp=2)).batch_shards
        8
        """
        if self.local_steps > 1 and self.dp != other.dp:
            raise ConfigError(
                f"parallel.dp: a run with parallel.local_steps has the optimizer states of its "
                f"{self.dp} replicas and continues on as many, got {other.dp}",
                hint=f"set parallel.dp={self.dp}; each may have another number of ranks",
            )
        fixed = ("batch_shards", "grad_compression", "local_steps", "outer_lr", "outer_momentum")
        return replace(other, **{name: getattr(self, name) for name in fixed})
