"""Small recipes for tests, and what of a run has to be the same in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ingot.nn import DecoderConfig, DenseConfig, Rope
from ingot.observe.metrics import read
from ingot.training.optimizer import AdamWConfig
from ingot.training.recipe import DigitsData, Recipe, TextData, XorData
from ingot.training.schedule import LRSchedule
from ingot.training.trainer import Trainer

TINY = DecoderConfig(
    vocab_size=300,
    dim=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    ffn_dim=64,
    max_seq_len=64,
    rope=Rope(),
    tie_embeddings=True,
)

WORDS = ("one", "model", "from", "training", "to", "serving", "through", "the", "same", "kernels")


def xor(**options: Any) -> Recipe:
    model = DenseConfig(in_features=2, hidden_dims=(16,), out_features=2)
    known: dict[str, Any] = {
        "name": "xor",
        "steps": 30,
        "global_batch_size": 4,
        "model": model,
        "data": XorData(),
    }
    return Recipe(**{**known, "optimizer": AdamWConfig(lr=0.03, weight_decay=0.0), **options})


def digits(model: Any, **options: Any) -> Recipe:
    known: dict[str, Any] = {
        "name": "digits",
        "steps": 6,
        "global_batch_size": 32,
        "data": DigitsData(),
    }
    return Recipe(**{**known, "model": model, "checkpoint_every": 3, **options})


def text(tmp_path: Path, **options: Any) -> Recipe:
    """A decoder on a few kilobytes of text, with everything on that keeps state."""
    source = tmp_path / "source.txt"
    if not source.exists():
        lines = [" ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 9)) for i in range(400)]
        source.write_text("\n".join(lines))
    data = TextData(
        source=str(source),
        vocab_size=300,
        seq_len=32,
        validation_fraction=0.1,
        cache_dir=tmp_path / "corpus",
    )
    known: dict[str, Any] = {
        "name": "text",
        "steps": 12,
        "global_batch_size": 4,
        "model": TINY,
        "data": data,
        "checkpoint_every": 4,
        "eval_every": 6,
        "eval_batches": 2,
        "dropout": 0.1,
        "ema_decay": 0.9,
        "schedule": LRSchedule(warmup_steps=3),
    }
    return Recipe(**{**known, **options})


def curve(directory: Path) -> list[tuple[Any, ...]]:
    """All losses and norms of a run."""
    keys = (
        "step",
        "loss",
        "grad_norm",
        "lr",
        "clip_factor",
        "update_norm",
        "grad_momentum_cos",
        "largest_update_share",
        "validation_loss",
        "accuracy",
        "skipped",
    )
    return [tuple(line.get(key) for key in keys) for line in read(directory)]


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Everything that determines the future."""
    parts = trainer._tensors()
    return {f"{part}/{name}": t for part, tensors in parts.items() for name, t in tensors.items()}


def assert_same(one: Trainer, other: Trainer) -> None:
    assert curve(one.directory) == curve(other.directory)
    a, b = state(one), state(other)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name
    assert one.spike_detector.state_dict() == other.spike_detector.state_dict()
    assert one.loader.state_dict() == other.loader.state_dict()
