"""Blended images and labels agree, and are functions of the seed and the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ingot.core.errors import ConfigError
from ingot.training.mix import Mix, blend


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Image i is all i, so that a pixel says where it is from."""
    return torch.arange(6.0)[:, None, None].expand(6, 7, 5).contiguous(), torch.arange(6)


@pytest.mark.parametrize("step", range(20))
def test_mixup(step: int) -> None:
    x, y = batch()
    mixed = blend(Mix(kind="mixup"), x, y, seed=0, step=step)
    wanted = mixed.share * y + (1 - mixed.share) * mixed.other_y
    torch.testing.assert_close(mixed.x, wanted[:, None, None].expand(6, 7, 5))
    assert torch.equal(mixed.other_y.sort().values, y)


@pytest.mark.parametrize("step", range(20))
def test_cutmix(step: int) -> None:
    x, y = batch()
    mixed = blend(Mix(kind="cutmix"), x, y, seed=0, step=step)
    for image, one, other in zip(mixed.x, y, mixed.other_y, strict=True):
        own, strange = (image == one).float().mean(), (image == other).float().mean()
        if one != other:
            assert own.item() == pytest.approx(mixed.share)
            assert strange.item() == pytest.approx(1 - mixed.share)
    assert torch.equal(x, batch()[0])  # the batch itself is left alone


@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_the_key_decides(kind: Any) -> None:
    def found(**key: int) -> torch.Tensor:
        return blend(Mix(kind=kind), *batch(), **{"seed": 0, "step": 0, **key}).x

    assert torch.equal(found(), found())
    others = [found(seed=1), found(step=1), found(index=1)]
    assert not any(torch.equal(found(), other) for other in others)


def test_shares_are_spread() -> None:
    x, y = batch()
    shares = [blend(Mix(kind="mixup"), x, y, seed=0, step=s).share for s in range(200)]
    assert min(shares) < 0.1 < 0.9 < max(shares)
    few = [blend(Mix(kind="mixup", alpha=0.01), x, y, seed=0, step=s).share for s in range(50)]
    assert all(share < 0.01 or share > 0.99 for share in few[:10])


def test_bounds() -> None:
    with pytest.raises(ConfigError):
        Mix(kind="mixup", alpha=0.0)
