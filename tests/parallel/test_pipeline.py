"""Runs on a pipeline have the bits of a run in one process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ingot.nn import Decoder
from ingot.observe.metrics import read
from ingot.parallel.config import ParallelConfig
from ingot.parallel.mesh import Mesh
from ingot.parallel.pipeline import Pipeline
from ingot.parallel.ranks import Ranks
from ingot.parallel.shard import ShardedModel
from ingot.parallel.stage import cut_stages
from tests.parallel.comparison import LLAMA_70B, Jobs, compare

CASES = ["staged-dense", "staged-gpt2", "staged-moe"]
PP = {"pp": 2}
INTERLEAVED = {"pp": 2, "schedule": "interleaved_1f1b"}
ZERO_BUBBLE = {"pp": 2, "schedule": "interleaved_zero_bubble"}


def job(name: str, *cases: str, steps: int = 4, **options: Any) -> dict[str, Any]:
    return {"name": name, "cases": list(cases), "steps": steps, **options}


# The wrong one recomputes a block with the dropout of another micro-batch.
JOBS: Jobs = {
    1: [
        job("one", "staged-dense", "staged-moe", "staged-divided"),
        job("one", "staged-gpt2", steps=7),
    ],
    2: [
        job("1f1b", "staged-dense", "staged-moe", parallel=PP),
        job("1f1b", "staged-gpt2", parallel=PP, steps=7),
        job("zero-bubble", "staged-moe", parallel=ZERO_BUBBLE),
        job("changed", "staged-moe", parallel=INTERLEAVED, stop=2),
        job("wrong", "staged-dense", parallel=PP, fault="dropout of the last forward"),
    ],
    4: [
        job("fsdp", "staged-moe", parallel=PP),
        job("dp", "staged-dense", parallel={"dp": 2, **ZERO_BUBBLE}),
        job("tp", "staged-divided", parallel={"tp": 2, **INTERLEAVED}),
    ],
    0: [job("changed", "staged-moe", resume=True)],
}


def test_runs_on_a_pipeline_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """One test, as the runs are compared with each other: see `JOBS`."""
    compared = compare(JOBS, tmp_path)
    assert compared.pop(("wrong", "staged-dense"))
    assert compared == {key: [] for key in compared}
    assert len(compared) == 8
    steps = [line for line in read(tmp_path / "one" / "staged-gpt2") if "num_rows" in line]
    assert Counter(line["num_rows"] for line in steps)[16 * 32] == 6  # the seventh is shorter


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_thirty_steps_of_all_schedules_and_layouts(case: str, tmp_path: Path) -> None:
    """And runs that continue on another layout, or on one process."""
    schedules = {"1f1b": PP, "interleaved": INTERLEAVED, "zero-bubble": ZERO_BUBBLE}
    jobs: Jobs = {1: [job("one", case, steps=30)], 2: [], 4: [], 0: []}
    for name, parallel in schedules.items():
        jobs[2].append(job(f"2-{name}", case, steps=30, parallel=parallel))
        jobs[2].append(job(f"one-{name}", case, steps=30, parallel=parallel, stop=11))
        jobs[0].append(job(f"one-{name}", case, steps=30, resume=True))
        jobs[2].append(job(f"four-{name}", case, steps=30, parallel=PP, stop=13))
        jobs[4].append(job(f"four-{name}", case, steps=30, parallel=parallel, resume=True))
        for dp in (1, 2):
            jobs[4].append(job(f"4-{name}-{dp}", case, steps=30, parallel={**parallel, "dp": dp}))
    compared = compare(jobs, tmp_path)
    assert compared == {key: [] for key in compared}
    assert len(compared) == 15


def test_1024_ranks_have_every_row_of_70_billion_weights_once() -> None:
    """Stages, sharding and schedule, on a process group without processes; weights on `meta`.

    All 16 ranks of the first replica, of 64.
    """
    config = ParallelConfig(pp=8, dp=64, schedule="interleaved_1f1b")
    whole = {n: p.shape for n, p in Decoder.on_meta(LLAMA_70B).named_parameters()}
    owned: dict[str, list[tuple[int, int]]] = {}
    for rank in (128 * stage + fsdp for stage in range(8) for fsdp in range(2)):
        for name, (rows, shape) in rows_of_rank(rank, 1024, config).items():
            assert shape == (rows.stop - rows.start, *whole[name][1:])
            owned.setdefault(name, []).append((rows.start, rows.stop))
    for name, shape in whole.items():
        half = -(-shape[0] // 2)
        assert owned.pop(name) == [(0, half), (half, shape[0])]
    assert not owned


def rows_of_rank(
    rank: int, size: int, config: ParallelConfig
) -> dict[str, tuple[slice, tuple[int, ...]]]:
    """Build the pipeline of a rank; return which rows it has of each weight, and their shape."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        model = Decoder.on_meta(LLAMA_70B, torch.bfloat16)
        mesh = Mesh.build(Ranks(rank, size, dist.group.WORLD), config)
        stages = cut_stages(model, mesh.pp, config.schedule)
        sharded = ShardedModel(model, mesh, lambda name, grad: None, stages=stages)
        Pipeline(stages, sharded, config.schedule, num_micro_batches=16, shard_batches=4)
        named: Any = model.named_parameters()
        return {name: (sharded.rows(name)[0], tuple(p.to_local().shape)) for name, p in named}
    finally:
        dist.destroy_process_group()
