from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot.bench import gpt2_baseline
from ingot.bench.train_worker import batch
from ingot.core.errors import ConfigError
from ingot.interop import hf
from ingot.nn.loss import token_losses
from tests import models


def test_baseline_computes_the_same_loss_and_gradients(gpt2: Path) -> None:
    tokens, targets = batch(0, 3, 17, 211)
    decoder = hf.load(gpt2)
    ours = token_losses(decoder, tokens.flatten(), targets.flatten(), [17] * 3).sum() / (3 * 16)
    model = gpt2_baseline.load(gpt2)
    theirs = model(tokens, targets)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    ours.backward()
    theirs.backward()
    assert sum(p.numel() for p in model.parameters()) == sum(
        p.numel() for p in decoder.parameters()
    )
    torch.testing.assert_close(
        decoder.blocks[1].attention.qkv.weight.grad,  # pyright: ignore
        model.h[1].qkv.weight.grad,  # pyright: ignore
        rtol=1e-4,
        atol=1e-7,
    )


def test_another_architecture_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be a GPT-2"):
        gpt2_baseline.check_gpt2(models.small(tmp_path / "llama"))
