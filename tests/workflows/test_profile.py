"""`profile_training` names the bottleneck of planted slow runs, and what it suggests helps."""

from __future__ import annotations

import json
import lzma
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.core.errors import IngotError
from ingot.data import ArrayBatch, digits
from ingot.nn import DenseConfig
from ingot.observe.trace import Kind
from ingot.parallel.config import ParallelConfig
from ingot.parallel.ranks import Ranks
from ingot.training.precision import Precision
from ingot.training.recipe import Datasets, Recipe
from ingot.training.trainer import Trainer
from ingot.workflows.profile import MIN_SPEEDUP, Profile, Trial, profile_training
from tests.parallel.processes import run_ranks
from tests.training import runs

SMALL = DenseConfig(in_features=64, hidden_dims=(16,), out_features=10)
LARGE = DenseConfig(in_features=64, hidden_dims=(1024, 1024), out_features=10)
STEPS = 8


def profiled(recipe: Recipe, out: Path, datasets: Datasets | None = None) -> Profile:
    found = profile_training(recipe, out, steps=STEPS, datasets=datasets)
    assert found is not None
    assert found.window.steps == STEPS
    assert sum(found.window.kinds.values()) == pytest.approx(found.window.seconds)
    return found


def trial(found: Profile, words: str) -> Trial:
    (one,) = [trial for trial in found.trials if words in trial.text]
    return one


def cpu_seconds(recipe: Recipe, directory: Path, datasets: Datasets | None = None) -> float:
    """CPU seconds of this process for some rows: other processes of the machine do not matter."""
    trainer = Trainer(recipe, directory, datasets=datasets)
    for _ in range(2):
        trainer.run_step()
    start, rows = time.process_time(), 0
    for _ in range(STEPS):
        rows += trainer.run_step()["num_rows"]
    return (time.process_time() - start) / rows


class CompressedDigits:
    """The digits as large compressed images, which each batch decompresses and scales down."""

    def __init__(self) -> None:
        self.samples = digits()
        images = self.samples.batch(range(64)).x.view(-1, 8, 8).numpy()
        self.files = [
            lzma.compress(np.ascontiguousarray(np.kron(image, np.ones((48, 48)))).tobytes())
            for image in images
        ]

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, indices: Sequence[int]) -> ArrayBatch:
        for index in indices:
            image = np.frombuffer(lzma.decompress(self.files[index])).reshape(8, 48, 8, 48)
            image.mean((1, 3))
        return self.samples.batch(indices)


def test_slow_data_is_named_and_preparing_it_ahead_helps(tmp_path: Path) -> None:
    recipe = runs.digits(SMALL)
    slow = Datasets(CompressedDigits(), digits(), "compressed")
    found = profiled(recipe, tmp_path / "slow", slow)
    assert found.window.bottleneck == "data"
    assert found.window.share(Kind.DATA) > 0.5
    assert found.sentence.startswith("the data is the bottleneck")
    assert found.suggestions[0].startswith("prepare less in each batch")
    ahead = profiled(recipe, tmp_path / "ahead", Datasets(digits(), digits(), "in memory"))
    assert ahead.window.bottleneck != "data"
    assert (ahead.rows_per_second or 0) > 3 * (found.rows_per_second or 0)


def test_tiny_micro_batches_are_named_and_fewer_of_them_help(tmp_path: Path) -> None:
    recipe = runs.digits(SMALL, grad_accum_steps=16)
    found = profiled(recipe, tmp_path)
    assert found.window.bottleneck == "python"
    assert found.sentence.startswith("Python is the bottleneck")
    change = trial(found, "grad_accum_steps=1")
    assert change.text in found.suggestions[0]
    assert change.speedup > 3
    slow, fast = (cpu_seconds(one, tmp_path) for one in (recipe, change.recipe))
    assert slow > 3 * fast


def test_a_tiny_batch_is_named_and_a_larger_one_helps(tmp_path: Path) -> None:
    recipe = runs.xor()
    found = profiled(recipe, tmp_path)
    assert found.window.bottleneck == "python"
    change = trial(found, "global_batch_size=32")
    assert change.text in found.suggestions[0]
    slow, fast = (cpu_seconds(one, tmp_path) for one in (recipe, change.recipe))
    assert slow > 3 * fast


def test_recomputation_is_suggested_against_where_compute_limits(tmp_path: Path) -> None:
    model = replace(runs.TINY, dim=256, heads=4, head_dim=64, ffn_dim=1024)
    recipe = runs.text(tmp_path, model=model, recompute="full", global_batch_size=8)
    found = profiled(recipe, tmp_path / "out")
    assert found.window.bottleneck == "compute"
    assert found.sentence.startswith("compute is the bottleneck")
    change = trial(found, "recompute=none")
    slow, fast = (cpu_seconds(one, tmp_path) for one in (recipe, change.recipe))
    assert slow > 1.1 * fast


def test_float32_is_named_only_where_bfloat16_is_faster(tmp_path: Path) -> None:
    recipe = runs.digits(LARGE, global_batch_size=256)
    found = profiled(recipe, tmp_path)
    assert found.window.bottleneck == "compute"
    change = trial(found, "precision=bf16")
    assert change.recipe == replace(recipe, precision=Precision.BF16)
    suggested = any("precision=bf16" in text for text in found.suggestions)
    assert suggested == (change.speedup >= MIN_SPEEDUP)


def test_a_recipe_without_a_better_one_has_no_suggestion(tmp_path: Path) -> None:
    recipe = runs.digits(LARGE, global_batch_size=256, precision=Precision.BF16)
    found = profiled(recipe, tmp_path)
    assert found.trials == []
    assert found.suggestions == []


def profile_on_ranks(ranks: Ranks, options: dict[str, Any], directory: Path) -> None:
    parallel = ParallelConfig(dp=2)
    recipe = runs.digits(SMALL, grad_accum_steps=2, global_batch_size=4, parallel=parallel)
    found = profile_training(recipe, directory, steps=STEPS)
    assert (found is not None) == ranks.is_main
    if found is not None:
        result = {
            "bottleneck": found.window.bottleneck,
            "sentence": found.sentence,
            "ops": [op.name for op in found.window.ops],
            "shares": found.shares,
            "trials": {trial.text: trial.speedup for trial in found.trials},
        }
        (directory / "result.json").write_text(json.dumps(result))


def test_communication_is_named_and_a_larger_batch_helps(tmp_path: Path) -> None:
    run_ranks(2, f"{__name__}:profile_on_ranks", {}, tmp_path)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["bottleneck"] == "communication"
    assert found["sentence"].startswith("communication is the bottleneck")
    assert "ingot: communication: all_to_all" in found["ops"]
    assert len(found["shares"]) == 2
    assert (tmp_path / "rank-1-trace.json.gz").is_file()
    speedups = found["trials"]
    assert any("parallel.local_steps=8" in text for text in speedups)
    assert any("parallel.grad_compression=int8" in text for text in speedups)
    (larger,) = [s for text, s in speedups.items() if "global_batch_size=32" in text]
    assert larger > 3


def test_nothing_is_written_but_the_trace(tmp_path: Path) -> None:
    profiled(runs.xor(checkpoint_every=1, eval_every=1), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]


def test_no_steps_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(IngotError, match="steps: must be at least 1"):
        profile_training(runs.xor(), tmp_path, steps=0)
