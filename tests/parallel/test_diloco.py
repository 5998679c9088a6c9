"""Replicas that train on their own: what they compute, and runs that are resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.core.errors import ConfigError
from ingot.data import Loader
from ingot.observe.metrics import read
from ingot.parallel.config import ParallelConfig
from ingot.parallel.diloco import OuterOptimizer
from ingot.parallel.ranks import Ranks
from ingot.training import clip
from ingot.training.checkpoint import Checkpoint, Checkpoints
from ingot.training.precision import Precision
from ingot.training.recipe import Recipe, load_datasets
from ingot.training.trainer import Trainer
from tests.parallel.processes import run_ranks
from tests.training import runs

H, STEPS = 4, 10
PARTS = ("weights", "optimizer", "clipper")
CASES: dict[str, dict[str, Any]] = {
    "fp32": {"ema_decay": 0.0},
    "int8": {"precision": Precision.BF16, "grad_compression": "int8"},
}


def recipe_of(case: str, directory: Path) -> Recipe:
    """A run with dropout, statistics of clipping, and two checkpoints in each round."""
    options = dict(CASES[case])
    compression = options.pop("grad_compression", "none")
    parallel = ParallelConfig(
        dp=2, local_steps=H, batch_shards=4, grad_compression=compression, outer_lr=0.5
    )
    clipping = clip.ZClipConfig(max_norm=0.05, warmup_steps=3)
    known = {"steps": STEPS, "grad_accum_steps": 4, "eval_every": 4, "keep_checkpoints": 99}
    return runs.text(
        directory, **known, parallel=parallel, clip=clipping, **{"checkpoint_every": 2, **options}
    )


def train_all(ranks: Ranks, options: dict[str, Any], directory: Path) -> None:
    for job in options["jobs"]:
        for case in job.get("cases", CASES):
            train(ranks, job, case, directory)


def train(ranks: Ranks, job: dict[str, Any], case: str, directory: Path) -> None:
    """Train a case; "stop" stops it after a step, "resume" continues it, with a planted fault."""
    trainer = Trainer(recipe_of(case, directory), directory / job["name"] / case, ranks=ranks)
    name_part = trainer._name_part
    if job.get("wrong_replica"):  # all continue with the state of the first
        trainer._name_part = lambda part: part
    if job.get("resume"):
        assert trainer.resume()
    trainer._name_part = name_part

    def on_metrics(metrics: dict[str, Any]) -> None:
        if metrics["step"] == job.get("stop"):
            trainer.stop()

    assert (trainer.run(on_metrics) is None) is bool(job.get("stop"))


JOBS: dict[int, list[dict[str, Any]]] = {
    4: [{"name": "4-ranks"}, {"name": "changed", "stop": 6}],
    2: [
        {"name": "2-ranks"},
        {"name": "changed", "resume": True},
        {"name": "wrong", "cases": ["fp32"], "stop": 6},
        {"name": "wrong", "cases": ["fp32"], "resume": True, "wrong_replica": True},
    ],
}


def checkpoint(directory: Path, step: int) -> Checkpoint:
    kept = Checkpoints(directory / "checkpoints", keep=99)
    kept.quarantine_after(step)
    found = kept.latest()
    assert found is not None
    assert found.step == step
    return found


def saved(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint."""
    found = checkpoint(directory, STEPS)
    parts = [*PARTS, *(f"replica-1/{part}" for part in PARTS), "outer", "ema"]
    return {f"{part}/{name}": t for part in parts for name, t in found.tensors(part).items()}


def differences(one: Path, other: Path) -> list[str]:
    """What of two runs is not equal, bit for bit."""
    wanted, found = saved(one), saved(other)
    assert wanted.keys() == found.keys()
    tensors = [name for name, tensor in wanted.items() if not torch.equal(tensor, found[name])]
    return tensors if runs.curve(one) == runs.curve(other) else ["curve", *tensors]


def local_run(replica: int, recipe: Recipe, directory: Path) -> Trainer:
    """What a replica computes before the first synchronization, by a process without replicas."""
    alone = replace(
        recipe, parallel=ParallelConfig(), grad_accum_steps=2, global_batch_size=2, eval_every=0
    )
    trainer = Trainer(replace(alone, checkpoint_every=99), directory)
    data = {"batch_size": 1, "seed": recipe.seed, "rank": replica, "world_size": 2}
    trainer.loader = Loader(trainer.datasets.train, **data)
    trainer.train_step._seed = recipe.seed + replica
    trainer._is_due = lambda every: False
    trainer.run(lambda metrics: trainer.stop() if metrics["step"] == 2 else None)
    return trainer


def check_first_round(directory: Path, recipe: Recipe) -> None:
    """The replicas are two runs of their own, and the log has the means of both."""
    start = Trainer(recipe_of_one(recipe), directory / "start").master_weights.state_dict()
    middle = checkpoint(directory / "4-ranks" / "fp32", 2)
    alone = [local_run(i, recipe, directory / f"alone-{i}") for i in (0, 1)]
    for trainer, part in zip(alone, ("weights", "replica-1/weights"), strict=True):
        found = middle.tensors(part)
        for name, weight in trainer.master_weights.state_dict().items():
            assert torch.equal(found[name], weight), (part, name)
    outer = middle.tensors("outer")
    assert all(torch.equal(outer[name], start[name]) for name in start if name in outer)
    losses = [[line["loss"] for line in read(t.directory) if "loss" in line] for t in alone]
    logged = [line["loss"] for line in read(directory / "4-ranks" / "fp32") if "loss" in line]
    assert logged[:2] == pytest.approx([sum(both) / 2 for both in zip(*losses, strict=True)])


def recipe_of_one(recipe: Recipe) -> Recipe:
    return replace(recipe, parallel=ParallelConfig())


def test_replicas_on_any_number_of_ranks_and_resumed(tmp_path: Path) -> None:
    """One test, as starting processes takes longer than what they do: see `JOBS`."""
    load_datasets(recipe_of("fp32", tmp_path).data)  # once, not on every rank
    for size, jobs in JOBS.items():
        run_ranks(size, f"{__name__}:train_all", {"jobs": jobs}, tmp_path)
    for case in CASES:
        whole = tmp_path / "2-ranks" / case
        assert differences(whole, tmp_path / "4-ranks" / case) == []
        assert differences(whole, tmp_path / "changed" / case) == []
    assert differences(tmp_path / "2-ranks" / "fp32", tmp_path / "wrong" / "fp32")
    lines = [line for line in read(tmp_path / "2-ranks" / "fp32") if "sent_bytes" in line]
    sent = [line["sent_bytes"] for line in lines]
    synchronized = [line["step"] for line in lines if line["sent_bytes"] > 50_000]
    assert synchronized == [4, 8, 10]
    assert max(sent[:3]) < 1000
    int8 = [line["sent_bytes"] for line in read(tmp_path / "2-ranks" / "int8") if "loss" in line]
    assert 0.25 < int8[3] / sent[3] < 0.32
    for step, equal in ((10, True), (8, True), (6, False)):
        found = checkpoint(tmp_path / "2-ranks" / "fp32", step)
        first, second, outer = map(found.tensors, ("weights", "replica-1/weights", "outer"))
        for name in ("tok_embed.weight", "norm.weight"):
            assert torch.equal(first[name], second[name]) is equal
            assert torch.equal(first[name], outer[name]) is equal
    check_first_round(tmp_path, recipe_of("fp32", tmp_path))


def test_the_outer_optimizer_is_sgd_with_nesterov_momentum() -> None:
    config = ParallelConfig(dp=2, local_steps=2, outer_lr=0.7, outer_momentum=0.9)
    random = torch.Generator().manual_seed(0)
    start = torch.randn(5, 3, generator=random)
    weight = torch.nn.Parameter(start.clone())
    sgd = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    outer = OuterOptimizer({"w": start}, Ranks(), config)
    resumed = OuterOptimizer({"w": torch.zeros(5, 3)}, Ranks(), config)
    for _ in range(4):
        trained = weight.detach() + 0.1 * torch.randn(5, 3, generator=random)
        weight.grad = weight.detach() - trained
        sgd.step()
        resumed.load_state_dict(outer.state_dict())
        found = outer.update("w", trained)
        torch.testing.assert_close(found, weight.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(resumed.update("w", trained), found)


def test_what_replicas_on_their_own_cannot_do_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="local_steps: needs several replicas"):
        ParallelConfig(dp=1, local_steps=2)
    recipe = recipe_of("fp32", tmp_path)
    with pytest.raises(ConfigError, match="must divide the number of ranks, 1"):
        recipe.check_ranks(1)
    more = replace(recipe, parallel=replace(recipe.parallel, dp=4))
    with pytest.raises(ConfigError, match="continues on as many, got 4"):
        recipe.with_resumable_fields(more)
    longer = replace(recipe, parallel=replace(recipe.parallel, local_steps=8))
    assert recipe.with_resumable_fields(longer) != longer
