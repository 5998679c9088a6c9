"""The axes of ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ingot.core.errors import ConfigError
from ingot.parallel.config import ParallelConfig
from ingot.parallel.mesh import Mesh, mesh_shape
from ingot.parallel.ranks import Ranks


def coordinates(rank: int, size: int, config: ParallelConfig) -> dict[str, tuple[int, int]]:
    """The index and the number of ranks on every axis, of one rank of a run without processes."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        mesh = Mesh.build(Ranks(rank, size, dist.group.WORLD), config)
        axes = ("pp", "dp", "fsdp", "tp", "data")
        return {name: (getattr(mesh, name).rank, getattr(mesh, name).size) for name in axes}
    finally:
        dist.destroy_process_group()


def test_tp_varies_fastest_and_pp_slowest() -> None:
    config = ParallelConfig(pp=2, dp=2, tp=2)
    found = [coordinates(rank, 16, config) for rank in range(16)]
    shape = {"pp": 2, "dp": 2, "fsdp": 2, "tp": 2}
    assert all({name: axes[name][1] for name in shape} == shape for axes in found)
    assert [[axes[name][0] for name in shape] for axes in found] == [
        [rank >> 3 & 1, rank >> 2 & 1, rank >> 1 & 1, rank & 1] for rank in range(16)
    ]


def test_data_ranks_are_those_of_dp_and_fsdp() -> None:
    found = [coordinates(rank, 16, ParallelConfig(pp=2, dp=2, tp=2)) for rank in range(16)]
    assert [axes["data"] for axes in found] == [(rank >> 1 & 3, 4) for rank in range(16)]


def test_a_mesh_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="pp x dp x cp x tp = 2 x 2 x 1 x 1 must divide the number"
    ):
        mesh_shape(ParallelConfig(pp=2, dp=2), 6)


def test_experts_are_divided_among_the_ranks_that_shard_weights() -> None:
    assert mesh_shape(ParallelConfig(dp=2, ep=4), 8) == (1, 2, 4, 1, 1)
    with pytest.raises(ConfigError, match=r"must be 1, or the number of ranks .*, 4, got 2"):
        mesh_shape(ParallelConfig(dp=2, ep=2), 8)
