from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ingot.bench import plain
from ingot.bench.trainee import batch
from ingot.core.errors import ConfigError
from ingot.interop import hf
from ingot.nn.loss import token_losses
from tests import models


def test_plain_pytorch_computes_the_same(gpt2: Path) -> None:
    tokens, targets = batch(0, 3, 17, 211)
    decoder = hf.load(gpt2)
    ours = token_losses(decoder, tokens.flatten(), targets.flatten(), [17] * 3).sum() / (3 * 16)
    model = plain.load(gpt2)
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


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no GPT-2"):
        plain.check(models.small(tmp_path / "llama"))
