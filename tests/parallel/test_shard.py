"""Runs on several ranks have the bits of a run in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from ingot.nn import Decoder, MoEConfig
from ingot.nn.config import Activation, NormKind
from ingot.observe.metrics import read
from ingot.parallel import ranks as collectives
from ingot.parallel.compression import Int8Rounding
from ingot.parallel.config import ParallelConfig
from ingot.parallel.mesh import Mesh
from ingot.parallel.ranks import Ranks
from ingot.parallel.shard import ShardedModel, local, row_slice
from ingot.training import clip, optimizer
from ingot.training.checkpoint import Checkpoints
from ingot.training.precision import Precision
from ingot.training.recipe import Recipe
from ingot.training.trainer import Trainer
from tests.parallel.processes import run_ranks
from tests.training import runs

GPT2 = replace(
    runs.TINY,
    rope=None,
    norm=NormKind.LAYER,
    activation=Activation.GELU_TANH,
    kv_heads=2,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
)
# Some of four ranks have no expert.
MOE = replace(runs.TINY, moe=MoEConfig(num_experts=2, top_k=1, ffn_dim=48), tie_embeddings=False)
# Clipping at a norm that every step exceeds, so that the norm decides all bits that follow.
CLIP = clip.ClipNormConfig(max_norm=0.05)
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense-bf16": {"precision": Precision.BF16},
    "gpt2": {"model": GPT2, "global_batch_size": 8, "grad_accum_steps": 8},
    "moe": {"model": MOE, "precision": Precision.BF16},
    "lion": {"optimizer": optimizer.LionConfig(lr=1e-3), "precision": Precision.BF16},
    "int8": {"grad_compression": "int8"},
    "int8-moe": {"model": MOE, "precision": Precision.BF16, "grad_compression": "int8"},
    "zclip": {"clip": clip.ZClipConfig(max_norm=0.05, warmup_steps=3), "ema_decay": 0.0},
}


Jobs = dict[int, list[dict[str, Any]]]


def recipe_of(case: str, job: dict[str, Any], directory: Path) -> Recipe:
    """A run with dropout, EMA, clipping, evaluations and checkpoints."""
    shards = job.get("shards", 4)
    of_case = dict(CASES[case])
    compression = of_case.pop("grad_compression", "none")
    layout = {"dp": job.get("dp", 1), "batch_shards": shards}
    parallel = ParallelConfig(**layout, grad_compression=compression)
    options = {"grad_accum_steps": shards, "clip": CLIP, **of_case, "parallel": parallel}
    options.setdefault("global_batch_size", shards)
    return runs.text(directory, steps=job.get("steps", 8), eval_every=3, **options)


# What ranks do one after another, as starting them takes longer than all of it.
JOBS: Jobs = {
    1: [{"name": "one", "cases": list(CASES)}],
    4: [
        {"name": "4-fsdp", "cases": list(CASES)},
        {"name": "4-hsdp", "cases": ["gpt2", "moe", "int8-moe"], "dp": 2},
        {"name": "4-dp", "cases": ["int8"], "dp": 4},
        {"name": "changed", "cases": ["moe"], "stop": 5},
        {"name": "wrong", "cases": ["dense"], "wrong_order": True},
        {"name": "wrong-shard", "cases": ["int8"], "wrong_shard": True},
    ],
    2: [
        {"name": "2-fsdp", "cases": ["gpt2", "int8-moe"]},
        {"name": "2-dp", "cases": ["dense-bf16", "int8"], "dp": 2},
        {"name": "changed", "cases": ["moe"], "dp": 2, "resume": True},
    ],
}


def train_all(ranks: Ranks, options: dict[str, Any], directory: Path) -> None:
    for job in options["jobs"]:
        for case in job["cases"]:
            train(ranks, job, case, directory)


def train(ranks: Ranks, job: dict[str, Any], case: str, directory: Path) -> None:
    """Train a case; "stop" stops it after a step, "resume" continues it."""
    recipe = recipe_of(case, job, directory)
    trainer = Trainer(recipe, directory / job["name"] / case, ranks=ranks)
    if job.get("resume"):
        assert trainer.resume()

    def on_metrics(metrics: dict[str, Any]) -> None:
        if metrics["step"] == job.get("stop"):
            trainer.stop()  # on the main rank alone: the others have to hear of it

    before = collectives.tree_sum
    if job.get("wrong_order"):
        collectives.tree_sum = _sum_in_turn
    set_shard = Int8Rounding.set_shard
    if job.get("wrong_shard"):  # the random numbers of a rank's own index of its shards
        Int8Rounding.set_shard = lambda self, step, shard: set_shard(
            self, step=step, shard=shard // ranks.size
        )
    assert (trainer.run(on_metrics) is None) is bool(job.get("stop"))
    collectives.tree_sum, Int8Rounding.set_shard = before, set_shard


def _sum_in_turn(parts: Any) -> torch.Tensor:
    total, *rest = parts
    for part in rest:
        total = total + part
    return total


def saved(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint."""
    checkpoint = Checkpoints(directory / "checkpoints", keep=1).latest()
    assert checkpoint is not None
    return {
        f"{part}/{name}": tensor
        for part in ("weights", "optimizer", "ema", "clipper")
        for name, tensor in checkpoint.tensors(part).items()
    }


def differences(one: Path, other: Path) -> list[str]:
    """What of two runs is not equal, bit for bit."""
    wanted, found = saved(one), saved(other)
    assert wanted.keys() == found.keys()
    tensors = [name for name, tensor in wanted.items() if not torch.equal(tensor, found[name])]
    same_curve = runs.curve(one) == runs.curve(other)
    return tensors if same_curve else ["curve", *tensors]


def sent_bytes(directory: Path) -> int:
    """What the main rank has sent in the last step."""
    return [line["sent_bytes"] for line in read(directory) if "sent_bytes" in line][-1]


def compare(jobs: Jobs, directory: Path) -> dict[tuple[str, str], list[str]]:
    """Run the jobs; return how each case of each run differs from that of one process."""
    train_all(Ranks(), {"jobs": jobs[1]}, directory)
    for size in (size for size in jobs if size > 1):
        run_ranks(size, f"{__name__}:train_all", {"jobs": jobs[size]}, directory)
    return {
        (job["name"], case): differences(directory / "one" / case, directory / job["name"] / case)
        for size, of_size in jobs.items()
        for job in of_size
        for case in job["cases"]
        if size > 1
    }


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
    cases = ["dense", "gpt2", "moe", "int8", "int8-moe"]
    shared = {"cases": cases, "shards": 8, "steps": 30}
    jobs: Jobs = {
        1: [{"name": "one", **shared}],
        8: [{"name": f"8-{dp}", "dp": dp, **shared} for dp in (1, 2, 4, 8)]
        + [{"name": f"changed-{size}", "stop": 15, **shared} for size in (2, 4)],
        4: [{"name": f"4-{dp}", "dp": dp, **shared} for dp in (1, 2)]
        + [{"name": "changed-4", "dp": 2, "resume": True, **shared}],
        2: [{"name": "2-1", **shared}, {"name": "changed-2", "resume": True, **shared}],
    }
    compared = compare(jobs, tmp_path)
    assert compared == {key: [] for key in compared}
    assert len(compared) == 9 * len(cases)


LLAMA_70B = replace(
    runs.TINY,
    vocab_size=128_256,
    dim=8192,
    layers=80,
    heads=64,
    kv_heads=8,
    head_dim=128,
    ffn_dim=28_672,
    tie_embeddings=False,
)


@pytest.mark.parametrize("dp", [1, 16])
def test_1024_ranks_store_every_row_of_70_billion_weights_once(dp: int) -> None:
    """The real code on a process group of torch without processes, and weights without memory."""
    size, whole = 1024, {}
    for rank in (0, 65, 1023):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        try:
            model = Decoder.on_meta(LLAMA_70B, torch.bfloat16)
            whole = {name: p.shape for name, p in model.named_parameters()}
            ranks = Ranks(rank, size, dist.group.WORLD)
            mesh = Mesh.build(ranks, ParallelConfig(dp=dp))
            sharded = ShardedModel(model, mesh, lambda name, grad: None)
        finally:
            dist.destroy_process_group()
        own = {name: local(p) for name, p in model.named_parameters()}
        assert own.keys() == whole.keys()
        for name, shape in whole.items():
            rows = sharded.rows(name)
            assert own[name].shape == (rows.stop - rows.start, *shape[1:])
        number = sum(tensor.numel() for tensor in own.values())
        assert number <= 1.01 * 70.55e9 / (size // dp)
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
