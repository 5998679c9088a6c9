"""Mixup and CutMix: images mixed with others of their batch, and their labels likewise.

    mixup    x = l x + (1 - l) x'  (Zhang et al. 2017)
    cutmix   a box of x is replaced by that of x', and l is the fraction of x that is left
             (Yun et al. 2019)

l is sampled from Beta(a, a) for each batch, and x' is the batch in another order. The loss is
l loss(y) + (1 - l) loss(y'). The samples are a function of the seed and the step.
"""

# pyright: basic
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ingot.core.config import check_bounds
from ingot.core.random import Purpose, philox_generator


@dataclass(frozen=True, kw_only=True)
class MixupConfig:
    """Options of mixup and CutMix.

    >>> MixupConfig(kind="cutmix").alpha
    1.0
    """

    kind: Literal["mixup", "cutmix"]
    """Interpolate whole images, or replace a box."""
    alpha: float = 1.0
    """Parameter of the Beta distribution: near 0 images are hardly mixed, 1 is uniform."""

    def __post_init__(self) -> None:
        check_bounds(self, alpha=(1e-3, 1e3))


@dataclass(frozen=True, kw_only=True)
class MixedBatch:
    """Mixed images, both labels of each, and the weight `lam` of the first."""

    x: Tensor
    y: Tensor
    other_y: Tensor
    lam: float


def apply_mixup(
    config: MixupConfig, x: Tensor, y: Tensor, *, seed: int, step: int, index: int = 0
) -> MixedBatch:
    """Mix a batch of images; `index` is the number of the micro-batch in its step.

    >>> config = MixupConfig(kind="mixup")
    >>> mixed = apply_mixup(config, torch.eye(2), torch.arange(2), seed=0, step=0)
    >>> mixed.x.sum().item()
    2.0
    """
    random = np.random.Generator(philox_generator(Purpose.MIXUP, seed=seed, step=step, index=index))
    order = torch.from_numpy(random.permutation(len(x)))
    lam = float(random.beta(config.alpha, config.alpha))
    if config.kind == "mixup":
        blended = torch.lerp(x[order], x, lam)
        return MixedBatch(x=blended, y=y, other_y=y[order], lam=lam)
    top, bottom = _interval(random, x.shape[-2], lam)
    left, right = _interval(random, x.shape[-1], lam)
    cut = x.clone()
    cut[..., top:bottom, left:right] = x[order][..., top:bottom, left:right]
    kept = 1 - (bottom - top) * (right - left) / (x.shape[-2] * x.shape[-1])
    return MixedBatch(x=cut, y=y, other_y=y[order], lam=kept)


def _interval(random: np.random.Generator, size: int, lam: float) -> tuple[int, int]:
    """Return an interval around a random center, clipped to the borders."""
    length, middle = size * math.sqrt(1 - lam), random.uniform(0, size)
    return max(0, round(middle - length / 2)), min(size, round(middle + length / 2))
