"""Runs: learned, repeated, killed and resumed, and what happens when something goes wrong."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ingot.core import config
from ingot.core.device import detect
from ingot.core.errors import ConfigError, IngotError
from ingot.nn import CNNConfig, Decoder, DenseConfig, GRUConfig, ResNetConfig
from ingot.observe.metrics import read
from ingot.training import clip, optimizer
from ingot.training import trainer as module
from ingot.training.evaluate import LOGPROBS
from ingot.training.flops import flops_per_token
from ingot.training.guard import Diverged, SpikeGuardConfig
from ingot.training.mixup import MixupConfig
from ingot.training.precision import Precision
from ingot.training.recipe import Recipe
from ingot.training.step import StepStats, TrainStep
from ingot.training.trainer import RECIPE, Trainer
from tests.training import runs


class Killed(BaseException):
    """As if the process had ended there."""


def killed(recipe: Recipe, directory: Path, steps: int) -> None:
    """A run that is cut off in the middle of a step."""
    trainer, made = Trainer(recipe, directory), 0
    plain = trainer.train_step.optimizer_step

    def update(factor: float) -> dict[str, float]:
        nonlocal made
        if made == steps:
            raise Killed
        made += 1
        return plain(factor)

    trainer.train_step.optimizer_step = update  # pyright: ignore
    with pytest.raises(Killed):
        trainer.run()
    trainer.checkpoints.wait()


def whole(recipe: Recipe, directory: Path) -> Trainer:
    trainer = Trainer(recipe, directory)
    assert trainer.run() is not None
    return trainer


def resumed(recipe: Recipe, directory: Path) -> Trainer:
    trainer = Trainer(recipe, directory)
    trainer.resume()
    assert trainer.run() is not None
    return trainer


def test_xor_is_learned(tmp_path: Path) -> None:
    score = (
        whole(runs.xor(steps=150), tmp_path).recipe
        and Trainer(runs.xor(steps=150), tmp_path / "again").run()
    )
    assert score is not None
    assert score.loss < 0.01
    assert score.accuracy == 1.0


@pytest.mark.parametrize("precision", list(Precision))
def test_text_is_learned(tmp_path: Path, precision: Precision) -> None:
    recipe = runs.text(
        tmp_path, steps=30, precision=precision, optimizer=optimizer.AdamWConfig(lr=1e-2)
    )
    trainer = whole(recipe, tmp_path / "run")
    losses = [line["loss"] for line in read(trainer.directory) if "loss" in line]
    assert losses[-1] < losses[0] - 1.0


def test_the_same_seed_gives_the_same_losses_twice(tmp_path: Path) -> None:
    recipe = runs.text(tmp_path)
    one, other = whole(recipe, tmp_path / "a"), whole(recipe, tmp_path / "b")
    runs.assert_same(one, other)
    third = whole(replace(recipe, seed=1), tmp_path / "c")
    assert runs.curve(third.directory) != runs.curve(one.directory)


# The first losses of `runs.text`, seed 0, by tier. Another ISA adds up in another order, and
# bfloat16 then rounds otherwise: by 1e-5 here, so 1e-4 is allowed from tier to tier. On the same
# one what PyTorch computes, such as float32 matmuls, may still differ from CPU to CPU.
_FP32 = [5.633118, 5.597165, 5.557627, 5.522528, 5.43469, 5.373553]
_BF16 = [5.633129, 5.597373, 5.557872, 5.523007, 5.435702, 5.374022]
GOLDEN = {
    "amx": {
        Precision.FP32: _FP32,
        Precision.BF16: [5.633117, 5.597344, 5.55787, 5.522941, 5.435709, 5.374042],
    },
    "avx512_bf16": {Precision.FP32: _FP32, Precision.BF16: _BF16},
    "avx512_vnni": {Precision.FP32: _FP32, Precision.BF16: _BF16},
    "avx512": {Precision.FP32: _FP32, Precision.BF16: _BF16},
    "avx2": {Precision.FP32: _FP32, Precision.BF16: _BF16},
    "portable": {
        Precision.FP32: _FP32,
        Precision.BF16: [5.633129, 5.597373, 5.557872, 5.522991, 5.435702, 5.374049],
    },
}
ACROSS = {Precision.FP32: 1e-5, Precision.BF16: 1e-4}
WITHIN = {Precision.FP32: 1e-5, Precision.BF16: 2e-5}


@pytest.mark.parametrize("precision", ACROSS)
def test_losses_do_not_drift_from_version_to_version(tmp_path: Path, precision: Precision) -> None:
    trainer = whole(runs.text(tmp_path, precision=precision), tmp_path / "run")
    losses = [line["loss"] for line in read(trainer.directory) if "loss" in line]
    wanted = GOLDEN[detect().cpu.isa[0]][precision]
    assert losses[:6] == pytest.approx(wanted, rel=WITHIN[precision])


@pytest.mark.parametrize("precision", ACROSS)
def test_losses_are_alike_on_all_tiers(precision: Precision) -> None:
    one, *others = (by_precision[precision] for by_precision in GOLDEN.values())
    for other in others:
        assert other == pytest.approx(one, rel=ACROSS[precision])


@pytest.mark.slow
@pytest.mark.skipif("INGOT_ISA" in os.environ, reason="this is such a run")
@pytest.mark.parametrize("tier", detect().cpu.isa[1:])
def test_the_other_tiers_do_not_drift_either(tier: str) -> None:
    test = f"{__file__}::{test_losses_do_not_drift_from_version_to_version.__name__}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    environment = {**os.environ, "INGOT_ISA": tier}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


OPTIONS: list[dict[str, Any]] = [
    {},
    {"precision": Precision.BF16, "clip": clip.AdaGCConfig(warmup_steps=3)},
    {
        "precision": Precision.BF16,
        "optimizer": optimizer.AdamWConfig(state_dtype="bf16"),
        "grad_accum_steps": 2,
    },
    {"precision": Precision.BF16, "optimizer": optimizer.MuonConfig()},
    {"precision": Precision.FP16, "clip": clip.ZClipConfig(warmup_steps=3)},
    {
        "optimizer": optimizer.SOAPConfig(precondition_frequency=2),
        "clip": clip.AdaGCConfig(warmup_steps=3),
        "ema_decay": 0.0,
    },
    {"grad_accum_steps": 2, "recompute": "full"},
]


@pytest.mark.parametrize(
    ("options", "steps"), [*((options, 7) for options in OPTIONS), ({}, 0), ({}, 4), ({}, 11)]
)
def test_a_killed_run_resumes_bitwise(tmp_path: Path, options: dict[str, Any], steps: int) -> None:
    recipe = runs.text(tmp_path, **options)
    killed(recipe, tmp_path / "killed", steps)
    runs.assert_same(resumed(recipe, tmp_path / "killed"), whole(recipe, tmp_path / "whole"))


@pytest.mark.parametrize(
    "model",
    [
        DenseConfig(in_features=64, hidden_dims=(16,), out_features=10, dropout=0.1),
        CNNConfig(widths=(4, 8), num_classes=10, dropout=0.1),
        ResNetConfig(widths=(4, 8), blocks_per_stage=1, num_classes=10),
    ],
    ids=lambda model: model.kind,
)
def test_image_models_resume_bitwise(tmp_path: Path, model: Any) -> None:
    recipe = runs.digits(model, mixup=MixupConfig(kind="cutmix"), label_smoothing=0.1)
    killed(recipe, tmp_path / "killed", 4)
    runs.assert_same(resumed(recipe, tmp_path / "killed"), whole(recipe, tmp_path / "whole"))


def test_a_gru_resumes_bitwise(tmp_path: Path) -> None:
    recipe = runs.text(tmp_path, model=GRUConfig(vocab_size=300, dim=16), dropout=0.0)
    killed(recipe, tmp_path / "killed", 5)
    runs.assert_same(resumed(recipe, tmp_path / "killed"), whole(recipe, tmp_path / "whole"))


def test_a_run_resumes_with_other_micro_batches_up_to_rounding(tmp_path: Path) -> None:
    recipe = runs.text(tmp_path)
    killed(recipe, tmp_path / "killed", 7)
    other = resumed(replace(recipe, grad_accum_steps=4), tmp_path / "killed")
    same = whole(recipe, tmp_path / "whole")
    for a, b in zip(runs.curve(other.directory), runs.curve(same.directory), strict=True):
        assert a[:1] == b[:1]
        assert [x for x in a[1:6] if x] == pytest.approx([x for x in b[1:6] if x], rel=1e-3)


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path) -> None:
    recipe = runs.text(tmp_path)
    killed(recipe, tmp_path / "killed", 9)
    file = tmp_path / "killed/checkpoints/step-00000008/model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    runs.assert_same(resumed(recipe, tmp_path / "killed"), whole(recipe, tmp_path / "whole"))


def test_a_finished_run_can_be_resumed_and_lengthened(tmp_path: Path) -> None:
    whole(runs.xor(steps=10), tmp_path)
    assert resumed(runs.xor(steps=10), tmp_path).step == 10
    assert resumed(runs.xor(steps=15), tmp_path).step == 15


def test_another_recipe_or_other_data_is_rejected(tmp_path: Path) -> None:
    recipe = runs.text(tmp_path)
    killed(recipe, tmp_path / "run", 5)
    with pytest.raises(ConfigError, match="another recipe, optimizer"):
        Trainer(replace(recipe, optimizer=optimizer.LionConfig()), tmp_path / "run").resume()
    path = next((tmp_path / "run/checkpoints").glob("step-*/checkpoint.json"))
    path.write_text(path.read_text().replace('"data": "', '"data": "other'))
    with pytest.raises(ConfigError, match="other data"):
        Trainer(recipe, tmp_path / "run").resume()


def test_a_run_can_be_stopped(tmp_path: Path) -> None:
    recipe = runs.text(tmp_path)
    trainer = Trainer(recipe, tmp_path / "stopped")
    plain = trainer.train_step.optimizer_step

    def update(factor: float) -> dict[str, float]:
        trainer.stop()
        return plain(factor)

    trainer.train_step.optimizer_step = update  # pyright: ignore
    assert trainer.run() is None
    assert trainer.step == 1
    runs.assert_same(resumed(recipe, tmp_path / "stopped"), whole(recipe, tmp_path / "whole"))


# ---- divergence


def spoiling(monkeypatch: pytest.MonkeyPatch, sample: int, loss: float, norm: float = 1.0) -> None:
    """Batches with this sample have this loss."""
    plain = TrainStep.forward_backward

    def forward_backward(self: TrainStep, micro_batches: Any, step: int) -> StepStats:
        found = plain(self, micro_batches, step)
        spoiled = any(sample in piece.sample_ids for piece in micro_batches)
        return replace(found, loss=loss, grad_norm=norm) if spoiled else found

    monkeypatch.setattr(module.TrainStep, "forward_backward", forward_backward)


def ids_of(recipe: Recipe, tmp_path: Path, step: int) -> list[int]:
    loader = Trainer(recipe, tmp_path / "probe").loader
    return [next(loader).sample_ids for _ in range(step)][-1]


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan)])
def test_stop(tmp_path: Path, monkeypatch: Any, loss: float, norm: float) -> None:
    recipe = runs.text(tmp_path)
    ids = ids_of(recipe, tmp_path, 6)
    spoiling(monkeypatch, ids[0], loss, norm)
    trainer = Trainer(recipe, tmp_path / "run")
    with pytest.raises(Diverged, match="step 6: a") as raised:
        trainer.run()
    assert "guard.policy=skip" in raised.value.hint
    saved = json.loads((tmp_path / "run/bad_batches/step-00000006.json").read_text())
    assert saved["sample_ids"] == ids
    assert trainer.checkpoints.latest().step == 4  # pyright: ignore
    assert all(w.isfinite().all() for w in trainer.master_weights.weights.values())


def test_a_spike_is_skipped(tmp_path: Path, monkeypatch: Any) -> None:
    recipe = runs.text(tmp_path, guard=SpikeGuardConfig(policy="skip", window=10), steps=16)
    spoiling(monkeypatch, ids_of(recipe, tmp_path, 13)[0], 1e4)
    trainer = whole(recipe, tmp_path / "run")
    lines = [line for line in read(trainer.directory) if "loss" in line]
    refused = [line["step"] for line in lines if "skipped" in line]
    assert refused == [13]
    assert len(lines) == 16
    assert trainer.loader.state_dict()["sample"] == 16 * 4


def test_rollback_goes_back_in_weights_and_on_in_data(tmp_path: Path, monkeypatch: Any) -> None:
    recipe = runs.text(tmp_path, guard=SpikeGuardConfig(policy="rollback"))
    spoiling(monkeypatch, ids_of(recipe, tmp_path, 7)[0], math.nan)
    trainer = whole(recipe, tmp_path / "run")
    lines = [line for line in read(trainer.directory) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9, 10, 11, 12]
    assert trainer.step == 12
    assert trainer.loader.state_dict()["sample"] == 15 * 4
    killed(recipe, tmp_path / "killed", 8)
    runs.assert_same(resumed(recipe, tmp_path / "killed"), trainer)


def test_patience_ends(tmp_path: Path, monkeypatch: Any) -> None:
    recipe = runs.text(tmp_path, guard=SpikeGuardConfig(policy="rollback", patience=2))

    def forward_backward(self: TrainStep, micro_batches: Any, step: int) -> StepStats:
        return StepStats(loss=math.nan, grad_norm=1.0, num_targets=1, num_rows=1)

    monkeypatch.setattr(module.TrainStep, "forward_backward", forward_backward)
    with pytest.raises(Diverged):
        Trainer(recipe, tmp_path / "run").run()
    assert len(read(tmp_path / "run")) == 2


def test_an_fp16_overflow_does_not_count_as_divergence(tmp_path: Path, monkeypatch: Any) -> None:
    recipe = runs.text(tmp_path, precision=Precision.FP16)
    spoiling(monkeypatch, ids_of(recipe, tmp_path, 3)[0], 2.0, math.inf)
    trainer = whole(recipe, tmp_path / "run")
    refused = [line for line in read(trainer.directory) if "skipped" in line]
    assert [line["skipped"] for line in refused] == ["the scaled loss overflowed"]
    assert trainer.master_weights.loss_scale == 2.0**15


# ---- what is written


def test_the_run_directory(tmp_path: Path) -> None:
    recipe = runs.text(tmp_path, ema_decay=0.0)
    trainer = whole(recipe, tmp_path / "run")
    assert config.load(Recipe, tmp_path / "run" / RECIPE) == recipe
    assert json.loads((tmp_path / "run/environment.json").read_text())["torch"]
    evaluations = [line for line in read(tmp_path / "run") if "validation_loss" in line]
    assert [line["step"] for line in evaluations] == [6, 12]
    assert (tmp_path / "run" / LOGPROBS).exists()
    left = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert left == ["step-00000004", "step-00000008", "step-00000012"]
    assert trainer.flops() == flops_per_token(runs.TINY, 32)


def test_a_full_disk_ends_the_run_with_a_hint(tmp_path: Path, monkeypatch: Any) -> None:
    from ingot.training import checkpoint

    recipe = runs.text(tmp_path)
    killed(recipe, tmp_path / "run", 5)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write", full)
    trainer = Trainer(recipe, tmp_path / "run")
    assert trainer.resume()
    with pytest.raises(IngotError, match="No space left"):
        trainer.run()
    monkeypatch.undo()
    runs.assert_same(resumed(recipe, tmp_path / "run"), whole(recipe, tmp_path / "whole"))


def test_tokens_that_cannot_be_read_end_the_run_with_a_hint(tmp_path: Path) -> None:
    recipe = runs.text(tmp_path)
    killed(recipe, tmp_path / "run", 5)
    shard = tmp_path / "corpus/train-00000.tokens"
    content = shard.read_bytes()
    shard.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    trainer = Trainer(recipe, tmp_path / "run")
    assert trainer.resume()
    with pytest.raises(IngotError, match=r"train-00000\.tokens") as raised:
        trainer.run()
    assert "restore the file" in raised.value.hint
    shard.write_bytes(content)
    runs.assert_same(resumed(recipe, tmp_path / "run"), whole(recipe, tmp_path / "whole"))


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    recipe = runs.text(tmp_path)
    same = whole(recipe, tmp_path / "a")
    monkeypatch.setattr("time.time", lambda: -1e9)
    runs.assert_same(whole(recipe, tmp_path / "b"), same)


def test_a_vocabulary_that_is_too_large_is_rejected(tmp_path: Path) -> None:
    recipe = runs.text(tmp_path, model=replace(runs.TINY, vocab_size=100))
    with pytest.raises(ConfigError, match=r"model\.vocab_size=300"):
        Trainer(recipe, tmp_path / "run")


def test_a_given_model_is_trained_on(tmp_path: Path) -> None:
    recipe = runs.text(tmp_path, model=None, init_from=tmp_path)
    model = Decoder.from_config(runs.TINY, seed=5, dtype=torch.bfloat16)
    before = model.tok_embed.weight.detach().clone()
    trainer = Trainer(recipe, tmp_path / "run", model)
    assert trainer.model is model
    assert torch.equal(trainer.master_weights.weights["tok_embed.weight"], before.float())


def test_in_bf16_the_models_weights_are_the_upper_halves(tmp_path: Path) -> None:
    """And what is saved of a run is both halves, and the mean of what they make together."""
    trainer = whole(runs.text(tmp_path, precision=Precision.BF16), tmp_path / "run")
    saved = trainer.checkpoints.latest()
    assert saved
    weights, mean = saved.tensors("weights"), saved.tensors("ema")
    for name, parameter in trainer.model.named_parameters():
        assert trainer.master_weights.weights[name] is parameter
        assert torch.equal(weights[name], parameter)
        assert weights[f"{name}|low_bits"].dtype == torch.int16
        assert weights[f"{name}|low_bits"].any()
        assert mean[name].dtype == torch.float32
    other = Trainer(replace(trainer.recipe, optimizer=optimizer.MuonConfig()), tmp_path / "other")
    assert not other.master_weights.low_bits


def test_a_checkpoint_in_two_halves_fills_a_model_with_the_upper_ones(tmp_path: Path) -> None:
    trainer = whole(runs.text(tmp_path, precision=Precision.BF16, ema_decay=0.0), tmp_path / "run")
    saved = trainer.checkpoints.latest()
    model = Decoder.from_config(runs.TINY, seed=9, dtype=torch.bfloat16)
    assert saved
    saved.load_into(model)
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
