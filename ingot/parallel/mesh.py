"""The axes along which ranks divide a run.

    pp      stages of layers (pipeline parallelism)
    dp      replicas of the weights
    fsdp    rows of the weights (fully sharded data parallelism)
    tp      rows of each matrix multiplication (tensor parallelism)

The ranks of an axis differ in their coordinate on it alone. `tp` varies fastest, since its ranks
communicate in every layer, then `fsdp`, `dp` and `pp`. Only `dp` and `fsdp` divide the batch: their
ranks together are those of `data`.
"""

# pyright: basic
from __future__ import annotations

from dataclasses import dataclass, replace

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ingot.core.errors import ConfigError
from ingot.parallel.config import ParallelConfig
from ingot.parallel.ranks import Ranks

_ALONE = Ranks()


@dataclass(frozen=True)
class Mesh:
    """The ranks of a run by axis; `Mesh()` is a single process.

    >>> Mesh().data.size
    1
    """

    world: Ranks = _ALONE
    """All ranks."""
    pp: Ranks = _ALONE
    dp: Ranks = _ALONE
    fsdp: Ranks = _ALONE
    tp: Ranks = _ALONE
    data: Ranks = _ALONE
    """The ranks that compute different micro-batches."""
    device_mesh: DeviceMesh | None = None
    """The same for torch; None for a single process."""

    @staticmethod
    def build(world: Ranks, config: ParallelConfig, device: str = "cpu") -> Mesh:
        """Divide the ranks; those that `config` does not mention shard weights (`fsdp`)."""
        if world.size == 1:
            return Mesh()
        shape = mesh_shape(config, world.size)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("pp", "dp", "fsdp", "tp"))

        def axis(axes: DeviceMesh) -> Ranks:
            return Ranks(axes.get_local_rank(), axes.size(), axes.get_group())

        return Mesh(
            world=world,
            pp=axis(mesh["pp"]),
            dp=axis(mesh["dp"]),
            fsdp=axis(mesh["fsdp"]),
            tp=axis(mesh["tp"]),
            data=axis(mesh["dp", "fsdp"]._flatten("data")),
            device_mesh=mesh,
        )

    @property
    def alternating_rank(self) -> int:
        """The index of this rank in `data` if replicas took turns: which shards of a batch those of
        a replica have together does not depend on their number."""
        return self.fsdp.rank * self.dp.size + self.dp.rank

    def replica(self) -> Mesh:
        """Return the ranks of this rank's replica, as if there were no others."""
        return replace(self, world=self.fsdp, dp=_ALONE, data=self.fsdp)


def mesh_shape(config: ParallelConfig, size: int) -> tuple[int, int, int, int]:
    """Return the number of ranks on the axes pp, dp, fsdp and tp.

    >>> mesh_shape(ParallelConfig(dp=2, pp=2), 16)
    (2, 2, 4, 1)
    """
    if size % (config.pp * config.dp * config.tp):
        raise ConfigError(
            f"parallel: pp x dp x tp = {config.pp} x {config.dp} x {config.tp} must divide the "
            f"number of ranks, {size}",
            hint="change one of them, or the number of ranks",
        )
    return config.pp, config.dp, size // (config.pp * config.dp * config.tp), config.tp
