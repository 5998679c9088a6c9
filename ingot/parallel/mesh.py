"""The axes along which ranks divide a run.

    pp      stages of layers (pipeline parallelism)
    dp      replicas of the weights
    fsdp    rows of the weights (fully sharded data parallelism)
    cp      tokens of a micro-batch (context parallelism), and rows of the weights, too
    tp      rows of each matrix multiplication (tensor parallelism)

Experts are divided among the ranks of `fsdp`, too (`ingot.parallel.expert`).
The ranks of an axis differ in their coordinate on it alone. `tp` varies fastest, since its ranks
communicate in every layer, then `cp`, `fsdp`, `dp` and `pp`. Only `dp` and `fsdp` divide the batch
into micro-batches: their ranks together are those of `data`.
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
    """The ranks that store different rows of the same weights, those of `cp` among them."""
    cp: Ranks = _ALONE
    tp: Ranks = _ALONE
    data: Ranks = _ALONE
    """The ranks that compute different micro-batches."""
    fsdp_mesh: DeviceMesh | None = None
    """`fsdp` for torch; None for a single process."""

    @property
    def is_main(self) -> bool:
        """Whether this rank is the first of those that have the same layers."""
        return self.data.is_main and self.cp.is_main and self.tp.is_main

    @staticmethod
    def build(world: Ranks, config: ParallelConfig, device: str = "cpu") -> Mesh:
        """Divide the ranks; those that `config` does not mention shard weights (`fsdp`)."""
        if world.size == 1:
            return Mesh()
        shape = mesh_shape(config, world.size)
        mesh = init_device_mesh(device, shape, mesh_dim_names=("pp", "dp", "fsdp", "cp", "tp"))
        fsdp_mesh = mesh["fsdp", "cp"]._flatten("fsdp_cp")

        def axis(axes: DeviceMesh) -> Ranks:
            return Ranks(axes.get_local_rank(), axes.size(), axes.get_group())

        return Mesh(
            world=world,
            pp=axis(mesh["pp"]),
            dp=axis(mesh["dp"]),
            fsdp=axis(fsdp_mesh),
            cp=axis(mesh["cp"]),
            tp=axis(mesh["tp"]),
            data=axis(mesh["dp", "fsdp"]._flatten("data")),
            fsdp_mesh=fsdp_mesh,
        )

    @property
    def alternating_rank(self) -> int:
        """The index of this rank in `data` if replicas took turns: which shards of a batch those of
        a replica have together does not depend on their number."""
        return self.fsdp.rank * self.dp.size + self.dp.rank

    def replica(self) -> Mesh:
        """Return the ranks of this rank's replica, as if there were no others."""
        return replace(self, world=self.fsdp, dp=_ALONE, data=self.fsdp)


def mesh_shape(config: ParallelConfig, size: int) -> tuple[int, int, int, int, int]:
    """Return the number of ranks on the axes pp, dp, fsdp, cp and tp.

    >>> mesh_shape(ParallelConfig(dp=2, pp=2), 16)
    (2, 2, 4, 1, 1)
    """
    given = config.pp * config.dp * config.cp * config.tp
    if size % given:
        raise ConfigError(
            f"parallel: pp x dp x cp x tp = {config.pp} x {config.dp} x {config.cp} x {config.tp} "
            f"must divide the number of ranks, {size}",
            hint="change one of them, or the number of ranks",
        )
    fsdp = size // given
    if config.ep not in (1, fsdp):
        raise ConfigError(
            f"parallel.ep: must be 1, or the number of ranks that shard a replica, {fsdp}, "
            f"got {config.ep}",
            hint=f"set parallel.ep={fsdp}, or change parallel.dp",
        )
    return config.pp, config.dp, fsdp, config.cp, config.tp
