"""Runs whose layers are divided among ranks have the bits of a run in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import pytest
import torch
from torch import Tensor

from ingot.parallel import tensor
from ingot.parallel.config import ParallelConfig
from ingot.parallel.ranks import Ranks
from ingot.training import clip
from ingot.training.precision import Precision
from ingot.training.recipe import Recipe
from ingot.training.trainer import Trainer
from tests.parallel.processes import run_ranks
from tests.parallel.test_shard import GPT2, differences
from tests.training import runs

# Grouped-query attention, and widths that are no multiple of a vector on a rank.
DENSE = replace(runs.TINY, dim=36, heads=8, kv_heads=4, head_dim=8, ffn_dim=76)
CASES: dict[str, dict[str, Any]] = {
    "dense": {"model": DENSE},
    "gpt2": {"model": replace(GPT2, heads=4, kv_heads=4, head_dim=8), "recompute": "full"},
}
CLIP = clip.ClipNormConfig(max_norm=0.05)
Jobs = dict[int, list[dict[str, Any]]]


def recipe_of(case: str, job: dict[str, Any], directory: Path) -> Recipe:
    parallel = ParallelConfig(tp=job.get("tp", 1), dp=job.get("dp", 1), batch_shards=2)
    options = {"precision": Precision.BF16, "clip": CLIP, "grad_accum_steps": 4, **CASES[case]}
    options["recompute"] = job.get("recompute", "none")
    return runs.text(directory, steps=job.get("steps", 6), eval_every=3, parallel=parallel, **options)


def train_all(ranks: Ranks, options: dict[str, Any], directory: Path) -> None:
    for job in options["jobs"]:
        for case in job["cases"]:
            train(ranks, job, case, directory)


def train(ranks: Ranks, job: dict[str, Any], case: str, directory: Path) -> None:
    recipe = recipe_of(case, job, directory)
    trainer = Trainer(recipe, directory / job["name"] / case, ranks=ranks)
    if job.get("resume"):
        assert trainer.resume()

    def on_metrics(metrics: dict[str, Any]) -> None:
        if metrics["step"] == job.get("stop"):
            trainer.stop()

    assert (trainer.run(on_metrics) is None) is bool(job.get("stop"))


JOBS: Jobs = {
    1: [{"name": "one", "cases": list(CASES)}],
    2: [{"name": "2", "cases": list(CASES), "tp": 2}],
}


def test_runs(tmp_path: Path) -> None:
    train_all(Ranks(), {"jobs": JOBS[1]}, tmp_path)
    run_ranks(2, f"{__name__}:train_all", {"jobs": JOBS[2]}, tmp_path)
    for case in CASES:
        print(case, differences(tmp_path / "one" / case, tmp_path / "2" / case))
    assert 0
