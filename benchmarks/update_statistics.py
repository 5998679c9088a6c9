"""Cost of the statistics of an update, as a share of a training step.

    python -m benchmarks.update_statistics [RECIPE]

trains the model of a recipe (by default stdlib-10m) on random tokens, with the statistics in every
second step. Prints the median times of the steps, of the updates with and without statistics, and
their difference as a share of a step, with its 20th and 80th percentile over pairs of neighbours.
"""

# pyright: basic
from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from ingot.core import config
from ingot.data import TokenBatch
from ingot.training.clip import Clipper
from ingot.training.objective import CrossEntropy
from ingot.training.optimizer import Optimizers
from ingot.training.precision import MasterWeights
from ingot.training.recipe import Recipe, build_model
from ingot.training.step import TrainStep

_PAIRS = 12


def main(path: str) -> None:
    """Measure and print."""
    recipe = config.load(Recipe, Path(path))
    model = build_model(recipe)
    masters = MasterWeights(model, recipe.precision, recipe.optimizer.updates_split_weights)
    step = TrainStep(
        model,
        masters,
        Optimizers(recipe.optimizer, model, masters.weights, masters.low_bits),
        Clipper(recipe.clip, len(masters.weights)),
        CrossEntropy(),
    )
    length = recipe.data.seq_len  # pyright: ignore[reportAttributeAccessIssue]
    count = recipe.global_batch_size // recipe.grad_accum_steps
    shape = 2, count * length
    tokens = torch.randint(recipe.model.vocab_size, shape)  # pyright: ignore
    batch = TokenBatch(tokens[0], tokens[1], [length] * count, list(range(count)))
    updates: dict[bool, list[float]] = {True: [], False: []}
    steps: list[float] = []
    for number in range(2 * _PAIRS + 2):
        has = number % 2 == 0
        start = time.perf_counter()
        step.forward_backward([batch] * recipe.grad_accum_steps, number)
        with mock.patch.object(Optimizers, "has_row_stats", has):
            begin = time.perf_counter()
            step.optimizer_step(1e-3)
            end = time.perf_counter()
        if number > 1:  # the first build kernels
            updates[has].append(1e3 * (end - begin))
            steps.append(1e3 * (end - start))
    with_stats, without = (np.array(updates[has]) for has in (True, False))
    shares = 100 * (with_stats - without) / np.median(steps)
    low, middle, high = np.percentile(shares, [20, 50, 80])
    print(f"step {np.median(steps):.1f} ms")  # noqa: T201
    print(f"update {np.median(without):.2f} ms, with statistics {np.median(with_stats):.2f} ms")  # noqa: T201
    print(f"share of a step {middle:.2f} % ({low:.2f} to {high:.2f})")  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "recipes/stdlib-10m.toml")
