"""Runs on several ranks have the bits of a run in one process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from ingot.nn import Decoder
from ingot.observe.metrics import read
from ingot.parallel.config import ParallelConfig
from ingot.parallel.mesh import Mesh
from ingot.parallel.ranks import Ranks, row_slice
from ingot.parallel.shard import ShardedModel, local
from tests.parallel.comparison import LLAMA_70B, Jobs, compare

CASES = ["dense", "dense-bf16", "gpt2", "moe", "lion", "zclip", "int8", "int8-moe"]

# What ranks do one after another, as starting them takes longer than all of it.
JOBS: Jobs = {
    1: [{"name": "one", "cases": CASES}],
    4: [
        {"name": "4-fsdp", "cases": CASES},
        {"name": "4-hsdp", "cases": ["gpt2", "moe", "int8-moe"], "parallel": {"dp": 2}},
        {"name": "4-dp", "cases": ["int8"], "parallel": {"dp": 4}},
        {"name": "changed", "cases": ["moe"], "stop": 2},
        {"name": "wrong", "cases": ["dense"], "fault": "sum in turn"},
        {"name": "wrong-shard", "cases": ["int8"], "fault": "random numbers of another shard"},
    ],
    2: [
        {"name": "2-fsdp", "cases": ["gpt2", "int8-moe"]},
        {"name": "2-dp", "cases": ["dense-bf16", "int8"], "parallel": {"dp": 2}},
        {"name": "changed", "cases": ["moe"], "parallel": {"dp": 2}, "resume": True},
    ],
}


def sent_bytes(directory: Path) -> int:
    """What the main rank has sent in the last step."""
    return [line["sent_bytes"] for line in read(directory) if "sent_bytes" in line][-1]


def test_runs_on_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """One test, as the runs are compared with each other: see `JOBS`."""
    compared = compare(JOBS, tmp_path)
    assert compared.pop(("wrong", "dense"))  # another order of summation is noticed
    assert compared.pop(("wrong-shard", "int8"))
    assert compared == {key: [] for key in compared}
    assert len(compared) == 17
    plain, int8 = (sent_bytes(tmp_path / "2-dp" / case) for case in ("dense-bf16", "int8"))
    assert 0.25 < int8 / plain < 0.32  # a scale for each 32 elements or more
    # To three other ranks instead of one, but one shard of each rank instead of two.
    assert sent_bytes(tmp_path / "4-dp" / "int8") == pytest.approx(3 / 2 * int8, rel=0.02)


@pytest.mark.slow
def test_thirty_steps_on_one_to_eight_ranks(tmp_path: Path) -> None:
    """FSDP, HSDP and DDP; and runs that are divided differently after half of their steps."""
    cases = ["dense", "gpt2", "moe", "int8", "int8-moe", "experts"]
    shared = {"cases": cases, "shards": 8, "steps": 30}
    experts = {**shared, "cases": ["experts"]}
    jobs: Jobs = {
        1: [{"name": "one", **shared}],
        8: [{"name": f"8-{dp}", "parallel": {"dp": dp}, **shared} for dp in (1, 2, 4, 8)]
        + [{"name": f"changed-{size}", "stop": 15, **shared} for size in (2, 4)]
        + [
            {"name": f"8-ep-{ep}", "parallel": {"dp": 8 // ep, "ep": ep}, **experts}
            for ep in (4, 8)
        ],
        4: [{"name": f"4-{dp}", "parallel": {"dp": dp}, **shared} for dp in (1, 2)]
        + [{"name": "changed-4", "parallel": {"dp": 2}, "resume": True, **shared}],
        2: [{"name": "2-1", **shared}, {"name": "changed-2", "resume": True, **shared}],
    }
    compared = compare(jobs, tmp_path)
    assert compared == {key: [] for key in compared}
    assert len(compared) == 9 * len(cases) + 2


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (16, 1), (1, 8), (4, 8)])
def test_1024_ranks_store_every_row_of_70_billion_weights_once(dp: int, tp: int) -> None:
    """The real code on a process group of torch without processes, and weights without memory."""
    size, whole = 1024, {}
    for rank in (0, 65, 1023):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            model = Decoder.on_meta(LLAMA_70B, torch.bfloat16)
            whole = {name: p.shape for name, p in model.named_parameters()}
            ranks = Ranks(rank, size, dist.group.WORLD)
            mesh = Mesh.build(ranks, ParallelConfig(dp=dp, tp=tp))
            sharded = ShardedModel(model, mesh, lambda name, grad: None)
        finally:
            dist.destroy_process_group()
        own = {name: local(p) for name, p in model.named_parameters()}
        assert own.keys() == whole.keys()
        for name, shape in whole.items():
            stored = sum(rows.stop - rows.start for rows in sharded.rows(name))
            assert own[name].shape == (stored, *shape[1:])
        number = sum(tensor.numel() for tensor in own.values())
        # Embeddings and the LM head, 3 % of the weights, are not divided by tensor parallelism.
        assert number <= (1.01 + 0.03 * (tp - 1)) * 70.55e9 / (size // dp)
    assert sum(math.prod(shape) for shape in whole.values()) == pytest.approx(70.55e9, rel=1e-3)


@given(st.integers(1, 5000), st.integers(0, 10))
def test_the_rows_of_all_ranks_are_the_whole(rows: int, levels: int) -> None:
    """`rows` divides as torch's `chunk`, with ranks that have none at the end."""
    size = 2**levels
    parts = [row_slice(rows, rank, size) for rank in range(size)]
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert (parts[0].start, parts[-1].stop) == (0, rows)
    chunks = torch.arange(rows).chunk(size)
    assert [p.stop - p.start for p in parts if p.stop > p.start] == [len(c) for c in chunks]
