"""Wrong bits in a replica are found, on real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.parallel.config import ParallelConfig
from ingot.parallel.mesh import Mesh
from ingot.parallel.ranks import Ranks, waited_seconds
from ingot.parallel.replicas import ReplicaError, check_replicas, checksum
from ingot.parallel.trace import write_collectives
from ingot.training.trainer import Trainer
from tests.parallel.comparison import recipe_of
from tests.parallel.processes import run_ranks

JOB = {"parallel": {"dp": 4}}


def flip_bit(tensor: torch.Tensor) -> None:
    """Change the lowest bit of the middle element."""
    flat = tensor.view(-1)
    flat.view(torch.int32)[len(flat) // 2] ^= 1


def check_tensors(ranks: Ranks, options: dict[str, Any], directory: Path) -> None:
    for parallel, broken, named in (
        (ParallelConfig(dp=4), 2, "rank 2 differ"),
        (ParallelConfig(dp=2), 3, "rank 1, 3 differ"),  # of two, either may be wrong
    ):
        mesh = Mesh.build(ranks, parallel)
        tensors = [torch.full((5, 3), mesh.fsdp.rank + 0.1), torch.arange(4)]
        check_replicas(mesh, tensors, 7)
        if ranks.rank == broken:
            flip_bit(tensors[0])
        with pytest.raises(ReplicaError, match=f"step 7: the weights of {named}"):
            check_replicas(mesh, tensors, 7)
    assert waited_seconds()["all_gather"] > 0
    path = directory / f"{ranks.rank}.json"
    assert write_collectives(path).startswith("all_gather")
    assert b"collective_seq_id" in path.read_bytes()


def train_with_a_wrong_bit(ranks: Ranks, options: dict[str, Any], directory: Path) -> None:
    check_tensors(ranks, options, directory)
    trainer = Trainer(recipe_of("dense", JOB, directory), directory / "run", ranks=ranks)

    def on_metrics(metrics: dict[str, Any]) -> None:
        if metrics["step"] == 3 and "loss" in metrics:
            flip_bit(next(iter(trainer.master_weights.weights.values())))

    if not ranks.is_main:
        on_metrics = lambda metrics: None  # noqa: E731
    with pytest.raises(ReplicaError, match="the weights of rank 0 differ"):
        trainer.run(on_metrics)


def test_a_wrong_bit_is_found_and_its_rank_named(tmp_path: Path) -> None:
    # Builds the data set, before the ranks read it.
    Trainer(recipe_of("dense", {}, tmp_path), tmp_path / "one")
    run_ranks(4, f"{__name__}:train_with_a_wrong_bit", {}, tmp_path)


def test_every_bit_counts() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.bool):
        tensor = torch.ones(3, dtype=dtype)
        before = checksum([tensor])
        bits = tensor.view(torch.uint8)
        for bit in range(8):
            bits[-1] ^= 1 << bit
            assert checksum([tensor]) != before
            bits[-1] ^= 1 << bit
        assert checksum([tensor]) == before
