"""Blended images and labels agree, and are functions of the seed and the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.core.errors import ConfigError
from ingot.training.mixup import MixupConfig, apply_mixup


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Image i is all i, so that a pixel says where it is from."""
    return torch.arange(6.0)[:, None, None].expand(6, 7, 5).contiguous(), torch.arange(6)


@pytest.mark.parametrize("step", range(20))
def test_mixup(step: int) -> None:
    x, y = batch()
    mixed = apply_mixup(MixupConfig(kind="mixup"), x, y, seed=0, step=step)
    wanted = mixed.lam * y + (1 - mixed.lam) * mixed.other_y
    torch.testing.assert_close(mixed.x, wanted[:, None, None].expand(6, 7, 5))
    assert torch.equal(mixed.other_y.sort().values, y)


@pytest.mark.parametrize("step", range(20))
def test_cutmix(step: int) -> None:
    x, y = batch()
    mixed = apply_mixup(MixupConfig(kind="cutmix"), x, y, seed=0, step=step)
    for image, one, other in zip(mixed.x, y, mixed.other_y, strict=True):
        own, strange = (image == one).float().mean(), (image == other).float().mean()
        if one != other:
            assert own.item() == pytest.approx(mixed.lam)
            assert strange.item() == pytest.approx(1 - mixed.lam)
    assert torch.equal(x, batch()[0])  # the batch itself is left alone


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_the_key_decides(kind: Any) -> None:
    def found(**key: int) -> torch.Tensor:
        return apply_mixup(MixupConfig(kind=kind), *batch(), **{"seed": 0, "step": 0, **key}).x

    assert torch.equal(found(), found())
    others = [found(seed=1), found(step=1), found(index=1)]
    assert not any(torch.equal(found(), other) for other in others)


def test_shares_are_spread() -> None:
    x, y = batch()
    shares = [apply_mixup(MixupConfig(kind="mixup"), x, y, seed=0, step=s).lam for s in range(200)]
    assert min(shares) < 0.1 < 0.9 < max(shares)
    few = [
        apply_mixup(MixupConfig(kind="mixup", alpha=0.01), x, y, seed=0, step=s).lam
        for s in range(50)
    ]
    assert all(lam < 0.01 or lam > 0.99 for lam in few[:10])


def test_bounds() -> None:
    with pytest.raises(ConfigError):
        MixupConfig(kind="mixup", alpha=0.0)
