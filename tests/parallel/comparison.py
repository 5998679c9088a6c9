"""Runs on several ranks, compared bit for bit with runs in one process.

A job trains recipes, by the names in `CASES`, on a number of ranks:

    name        directory of its runs
    cases       the recipes
    parallel    options of `ParallelConfig`
    shards      `parallel.batch_shards`, 4 unless given, and by default `grad_accum_steps`
    steps       steps of a run, 4 unless given
    recompute   the recomputation policy, that of the recipe unless given
    stop        stop after this step
    resume      continue the runs that are there
    fault       a planted fault: a function in `FAULTS`
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from ingot.nn import MoEConfig
from ingot.nn.config import Activation, NormKind, QkNorm
from ingot.parallel import context
from ingot.parallel import ranks as collectives
from ingot.parallel.compression import Int8Rounding
from ingot.parallel.config import ParallelConfig
from ingot.parallel.ranks import Ranks
from ingot.training import clip, optimizer
from ingot.training.checkpoint import Checkpoints
from ingot.training.evaluate import LOGPROBS
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
EXPERTS = replace(MOE, moe=MoEConfig(num_experts=8, top_k=3, ffn_dim=48))
GROUPED_HEADS = replace(runs.TINY, heads=8, kv_heads=4, head_dim=8, qk_norm=QkNorm.PER_HEAD)
# On a rank, widths that are no multiple of a vector; and pairs of query heads share keys.
DIVIDED = replace(runs.TINY, dim=36, heads=8, kv_heads=4, head_dim=8, ffn_dim=76)
# Four layers, so that two ranks can have two stages each.
STAGED: dict[str, Any] = {"layers": 4, "tie_embeddings": False}
UNTIED = replace(runs.TINY, **STAGED)
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
# Clipping at a norm that every step exceeds, so that the norm decides all bits that follow.
CLIP = clip.ClipNormConfig(max_norm=0.05)
INT8 = {"grad_compression": "int8"}
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense-bf16": {"precision": Precision.BF16},
    "gpt2": {"model": GPT2, "global_batch_size": 8, "grad_accum_steps": 8},
    "moe": {"model": MOE, "precision": Precision.BF16},
    "lion": {"optimizer": optimizer.LionConfig(lr=1e-3), "precision": Precision.BF16},
    "zclip": {"clip": clip.ZClipConfig(max_norm=0.05, warmup_steps=2), "ema_decay": 0.0},
    "int8": {"parallel": INT8},
    "int8-moe": {"model": MOE, "precision": Precision.BF16, "parallel": INT8},
    "experts": {"model": EXPERTS, "precision": Precision.BF16},
    "experts-accum": {"model": EXPERTS, "grad_accum_steps": 8},
    "experts-full": {"model": EXPERTS, "recompute": "full", "precision": Precision.BF16},
    "gpt2-bf16": {"model": GPT2, "precision": Precision.BF16},
    "grouped-heads": {"model": GROUPED_HEADS, "precision": Precision.BF16, "recompute": "full"},
    "divided": {"model": DIVIDED, "precision": Precision.BF16},
    "divided-float32": {"model": DIVIDED},
    "divided-gpt2": {
        "model": replace(GPT2, heads=4, kv_heads=4, head_dim=8),
        "precision": Precision.BF16,
        "grad_accum_steps": 8,
    },
    "staged-dense": {"model": UNTIED, "recompute": "full", "grad_accum_steps": 8},
    "staged-divided": {
        "model": replace(DIVIDED, **STAGED),
        "precision": Precision.BF16,
        "grad_accum_steps": 8,
    },
    # In seven steps an epoch ends, with a shorter sample.
    "staged-gpt2": {
        "model": replace(GPT2, **STAGED),
        "clip": clip.AdaGCConfig(warmup_steps=2),
        "global_batch_size": 16,
    },
    "staged-moe": {
        "model": replace(MOE, **STAGED),
        "precision": Precision.BF16,
        "recompute": "selective",
        "grad_accum_steps": 8,
    },
}

Jobs = dict[int, list[dict[str, Any]]]


def recipe_of(case: str, job: dict[str, Any], directory: Path) -> Recipe:
    """A run with dropout, EMA, clipping, evaluations and checkpoints."""
    shards = job.get("shards", 4)
    of_case = {"parallel": {}, **CASES[case]}
    layout = {**of_case.pop("parallel"), **job.get("parallel", {})}
    parallel = ParallelConfig(batch_shards=shards, **layout)
    options = {"grad_accum_steps": shards, "clip": CLIP, **of_case, "parallel": parallel}
    options.setdefault("global_batch_size", options["grad_accum_steps"])
    options |= {"recompute": job["recompute"]} if "recompute" in job else {}
    return runs.text(directory, steps=job.get("steps", 4), eval_every=3, **options)


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

    with FAULTS[job["fault"]](trainer) if "fault" in job else nullcontext():
        assert (trainer.run(on_metrics) is None) is bool(job.get("stop"))


def _sum_in_turn(trainer: Trainer) -> AbstractContextManager[Any]:
    """Sum over the ranks in another order."""

    def in_turn(parts: Any) -> torch.Tensor:
        total, *rest = parts
        for part in rest:
            total = total + part
        return total

    return mock.patch.object(collectives, "tree_sum", in_turn)


def _sum_own_tokens(trainer: Trainer) -> AbstractContextManager[Any]:
    """Sum the gradients of weights over each rank's tokens, then over the ranks: the usual way."""

    def sum_own(op: Any, ranks: Ranks, needs: list[bool], grad: Any, args: list[Any]) -> Any:
        return context._gradients(op, needs, grad, args)

    return mock.patch.object(context, "_weight_gradients", sum_own)


def _take_shard_of_rank(trainer: Trainer) -> AbstractContextManager[Any]:
    """Round with the random numbers of a rank's own index of its shards."""
    before = Int8Rounding.set_shard

    def set_shard(self: Int8Rounding, *, step: int, shard: int) -> None:
        before(self, step=step, shard=shard // trainer.ranks.size)

    return mock.patch.object(Int8Rounding, "set_shard", set_shard)


def _keep_dropout_of_last_forward(trainer: Trainer) -> AbstractContextManager[Any]:
    """Recompute a micro-batch with the dropout of the one whose forward was the last."""
    from ingot.parallel.pipeline import Pipeline

    before = Pipeline.before

    def in_forward(self: Pipeline, stage: Any, micro_batch: int) -> None:
        if micro_batch >= getattr(stage, "latest", -1) or micro_batch == 0:
            stage.latest = micro_batch
            before(self, stage, micro_batch)

    return mock.patch.object(Pipeline, "before", in_forward)


FAULTS: dict[str, Callable[[Trainer], AbstractContextManager[Any]]] = {
    "sum in turn": _sum_in_turn,
    "random numbers of another shard": _take_shard_of_rank,
    "sum own tokens": _sum_own_tokens,
    "dropout of the last forward": _keep_dropout_of_last_forward,
}


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
    if (one / LOGPROBS).read_bytes() != (other / LOGPROBS).read_bytes():
        tensors.append(LOGPROBS)
    same_curve = runs.curve(one) == runs.curve(other)
    return tensors if same_curve else ["curve", *tensors]


def compare(
    jobs: Jobs, directory: Path, function: str = f"{__name__}:train_all"
) -> dict[tuple[str, str], list[str]]:
    """Run the jobs; return how each case of each run differs from that of one process.

    `function` runs the jobs of several ranks.
    """
    train_all(Ranks(), {"jobs": jobs[1]}, directory)
    for size in (size for size in jobs if size > 1):
        run_ranks(size, function, {"jobs": jobs[size]}, directory)
    if 0 in jobs:  # after the others, in this process
        train_all(Ranks(), {"jobs": jobs[0]}, directory)
    return {
        (job["name"], case): differences(directory / "one" / case, directory / job["name"] / case)
        for size, of_size in jobs.items()
        for job in of_size
        for case in job["cases"]
        if size != 1 and not job.get("stop")
    }
