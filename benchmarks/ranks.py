"""What does training with the bits of one process cost on several ranks?

    torchrun --standalone --nproc-per-node 4 benchmarks/ranks.py [SYSTEM ...] [--rounds N]

times training steps of GPT-2 124M in bfloat16 on the ranks, interleaved:

    ingot      `ingot train --ranks`: FSDP2, sums in the order of the tree
    library    the same with FSDP2's own reduce-scatter, whose order depends on the number of ranks
    fsdp2      `ingot.bench.gpt2_baseline`, plain PyTorch, on FSDP2 with its mixed precision policy
               and torch's fused AdamW

Each rank computes one sequence of 256 tokens. Prints the p50 of the steps of the slowest rank, the
ratio of each system's time to ingot's (p50 of the rounds), and the peak memory of a rank after two
steps, which belongs to a system only if it runs alone.
"""

# pyright: basic
from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from ingot.bench.gpt2_baseline import GPT2
from ingot.bench.train_worker import WARMUP_STEPS, _reset_peak, _status, _trim, batch
from ingot.data import TokenBatch
from ingot.nn import Decoder, preset
from ingot.parallel.config import ParallelConfig
from ingot.parallel.mesh import Mesh
from ingot.parallel.ranks import Ranks, connect, disconnect
from ingot.parallel.shard import ShardedModel
from ingot.training.clip import ClipNormConfig, Clipper
from ingot.training.objective import CrossEntropy
from ingot.training.optimizer import AdamWConfig, Optimizers
from ingot.training.precision import MasterWeights, Precision
from ingot.training.step import TrainStep

CONFIG = preset("gpt2-124m")
LENGTH = 256
LR = 1e-4


def ingot(ranks: Ranks, ordered: bool = True) -> Callable[[int], float]:
    """Return a function that runs a step and returns its loss."""
    model = Decoder.from_config(CONFIG, seed=0)
    masters = MasterWeights(model, Precision.BF16, split=True)
    mesh = Mesh.build(ranks, ParallelConfig())
    sharded = ShardedModel(model, mesh, masters.gradients.add, torch.bfloat16)
    masters.shard(sharded)
    if not ordered:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(DefaultReduceScatter())
    optimizers = Optimizers(AdamWConfig(lr=LR), model, masters.weights, masters.low_bits)
    clipper = Clipper(ClipNormConfig(), len(masters.weights))
    options: dict[str, Any] = {"sharded": sharded, "mesh": mesh}
    step = TrainStep(model, masters, optimizers, clipper, CrossEntropy(), **options)

    def run(number: int) -> float:
        tokens, targets = batch(number * ranks.size + ranks.rank, 1, LENGTH, CONFIG.vocab_size)
        own = TokenBatch(tokens.flatten(), targets.flatten(), [LENGTH], [0])
        loss = step.forward_backward([own], number).loss
        step.optimizer_step(1.0)
        return loss

    return run


def fsdp2(ranks: Ranks) -> Callable[[int], float]:
    """Return the same for a plain FSDP2 loop."""
    torch.manual_seed(0)
    model = GPT2(CONFIG)
    mesh = init_device_mesh("cpu", (ranks.size,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.h, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=True)

    def run(number: int) -> float:
        tokens, targets = batch(number * ranks.size + ranks.rank, 1, LENGTH, CONFIG.vocab_size)
        loss = model(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return run


SYSTEMS: dict[str, Callable[[Ranks], Callable[[int], float]]] = {
    "ingot": ingot,
    "library": lambda ranks: ingot(ranks, ordered=False),
    "fsdp2": fsdp2,
}


def main(names: list[str], rounds: int) -> None:
    """Run the steps and print the table on rank 0."""
    ranks = connect()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks.size))
    steps = {name: SYSTEMS[name](ranks) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + WARMUP_STEPS):
        for name, run in steps.items():
            ranks.barrier()
            start = perf_counter()
            run(number)
            seconds = max(s for (s,) in ranks.gather([perf_counter() - start]))
            if number >= WARMUP_STEPS:
                times[name].append(seconds)
        if number == WARMUP_STEPS - 1:
            _trim()
            _reset_peak()
    peak = max(p for (p,) in ranks.gather([_status("VmHWM") / 1e9]))
    if ranks.is_main:
        for name, found in times.items():
            ratio = statistics.median(a / b for a, b in zip(found, times[names[0]], strict=True))
            print(  # noqa: T201
                f"{name:8} {statistics.median(found):.3f} s [{min(found):.3f}-{max(found):.3f}]"
                f"  {LENGTH * ranks.size / statistics.median(found):,.0f} tokens/s"
                f"  {ratio:.3f}x the time of {names[0]}  peak {peak:.2f} GB"
            )
    disconnect()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("systems", nargs="*", help=", ".join(SYSTEMS))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    main(args.systems or list(SYSTEMS), args.rounds)
