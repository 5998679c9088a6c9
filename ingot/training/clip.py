"""Gradient clipping: by a fixed norm, or by running statistics of the norms.

With |g| the norm of all gradients together:

    norm    |g| is at most `max_norm` (Pascanu et al. 2013)
    zclip   with the running mean m and deviation s of |g|: where z = (|g| - m) / s is above
            `z_threshold`, |g| becomes m + (z_threshold^2 / z) s (Kumar et al. 2025), and the
            clipped value enters the mean. The first 25 steps only collect statistics, clipped to
            `max_norm`.
    adagc   each tensor by its own running norm: |g_i| is at most `ratio` times it (Wang et al.
            2025). The first 100 steps are clipped to `max_norm` together, and the running norm is
            the minimum of those steps.

A clipper turns norms into factors, on the host. The train step multiplies the gradients by them,
together with other factors.
"""

# pyright: basic, reportPrivateImportUsage=false
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ingot import ops
from ingot.core.config import check_bounds
from ingot.parallel.ranks import Ranks

_MAX_NORM = (1e-9, 1e9)
_ALONE = Ranks()
# A row's squared norm has up to 38 bits, so 2^24 rows do not overflow 63.
_UNIT_BITS = 38


@dataclass(frozen=True, kw_only=True)
class ClipNormConfig:
    """Clip the norm of all gradients together."""

    kind: Literal["norm"] = "norm"
    max_norm: float = 1.0
    """Maximum norm of all gradients together."""

    def __post_init__(self) -> None:
        check_bounds(self, max_norm=_MAX_NORM)


@dataclass(frozen=True, kw_only=True)
class ZClipConfig:
    """Clip norms that are far above their running mean."""

    kind: Literal["zclip"] = "zclip"
    max_norm: float = 1.0
    """Maximum norm during the warm-up, before there are statistics."""
    z_threshold: float = 2.5
    """Deviations above the mean at which a norm is clipped."""
    beta: float = 0.97
    """Decay rate of the running mean and variance."""
    warmup_steps: int = 25
    """Steps that only collect statistics."""

    def __post_init__(self) -> None:
        check_bounds(
            self,
            max_norm=_MAX_NORM,
            z_threshold=(0.1, 1e3),
            beta=(0.0, 1.0),
            warmup_steps=(2, 10**6),
        )


@dataclass(frozen=True, kw_only=True)
class AdaGCConfig:
    """Clip each tensor by the running mean of its own norm."""

    kind: Literal["adagc"] = "adagc"
    max_norm: float = 1.0
    """Maximum norm of all gradients together during the warm-up."""
    ratio: float = 1.05
    """Maximum norm of a gradient relative to its running norm."""
    beta: float = 0.98
    """Decay rate of the running norms."""
    warmup_steps: int = 100
    """Steps that only collect statistics."""

    def __post_init__(self) -> None:
        check_bounds(
            self, max_norm=_MAX_NORM, ratio=(1e-3, 1e3), beta=(0.0, 1.0), warmup_steps=(1, 10**6)
        )


ClipConfig = ClipNormConfig | ZClipConfig | AdaGCConfig


class Clipper:
    """The clipping of one run, with its running statistics.

    >>> clipper = Clipper(ClipNormConfig(max_norm=1.0), 2)
    >>> clipper.factors(torch.tensor([3.0, 4.0]))
    tensor([0.2000, 0.2000])
    """

    def __init__(self, config: ClipConfig | None, tensors: int) -> None:
        self.config = config
        self._seen = 0
        self._mean, self._variance = 0.0, 0.0
        self._norms = torch.full((tensors,), math.inf)

    def factors(self, norms: Tensor) -> Tensor:
        """Return the factor of each gradient, given their norms, which must be finite."""
        total = float(norms.double().square().sum().sqrt())
        match self.config:
            case None:
                return torch.ones_like(norms)
            case ClipNormConfig(max_norm=max_norm):
                return torch.full_like(norms, _clip_factor(total, max_norm))
            case ZClipConfig():
                return torch.full_like(norms, self._zclip(self.config, total))
            case AdaGCConfig():
                return self._adagc(self.config, norms, total)

    def _zclip(self, config: ZClipConfig, norm: float) -> float:
        self._seen += 1
        if self._seen <= config.warmup_steps:
            factor = _clip_factor(norm, config.max_norm)
            # Welford's mean and variance of those so far.
            delta = norm * factor - self._mean
            self._mean += delta / self._seen
            moved = delta * (norm * factor - self._mean)
            self._variance += (moved - self._variance) / self._seen
            return factor
        deviation = math.sqrt(self._variance)
        z = (norm - self._mean) / max(deviation, 1e-6 * self._mean, 1e-12)
        clipped = (
            self._mean + config.z_threshold**2 / z * deviation if z > config.z_threshold else norm
        )
        delta = clipped - self._mean
        self._mean += (1 - config.beta) * delta
        self._variance = config.beta * self._variance + (1 - config.beta) * delta**2
        return clipped / norm if norm else 1.0

    def _adagc(self, config: AdaGCConfig, norms: Tensor, total: float) -> Tensor:
        self._seen += 1
        if self._seen <= config.warmup_steps:
            factors = torch.full_like(norms, _clip_factor(total, config.max_norm))
            self._norms = torch.minimum(self._norms, norms * factors)
            return factors
        factors = (config.ratio * self._norms / norms.clamp(min=1e-30)).clamp(max=1.0)
        self._norms = torch.lerp(self._norms, norms * factors, 1 - config.beta)
        return factors

    def state_dict(self) -> dict[str, Tensor]:
        """Return the running statistics."""
        numbers = [self._seen, self._mean, self._variance]
        return {"running": torch.tensor(numbers, dtype=torch.float64), "norms": self._norms}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a state that `state_dict` returned."""
        seen, self._mean, self._variance = state["running"].tolist()
        self._seen, self._norms = int(seen), state["norms"].clone()


def _clip_factor(norm: float, max_norm: float) -> float:
    return min(1.0, max_norm / norm) if norm else 1.0


def grad_norms(tensors: list[Tensor], ranks: Ranks = _ALONE) -> Tensor:
    """Return the norm of each tensor, in float32; `ranks` have different rows of them, or none.

    The bits do not depend on how the rows are divided, nor on the number of threads: the squared
    norms of rows are summed as integers, in a unit that the largest determines.

    >>> grad_norms([torch.tensor([3.0, 4.0]), torch.zeros(2)])
    tensor([5., 0.])
    """
    squares = [_row_squares(tensor).double() for tensor in tensors]
    largest = ranks.max(torch.stack([_largest(rows) for rows in squares]))
    units = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - _UNIT_BITS)
    integers = [
        (rows.nan_to_num(0.0, posinf=0.0) / unit).long().sum()
        for rows, unit in zip(squares, units, strict=True)
    ]
    sums = ranks.sum_integers(torch.stack(integers)).double() * units
    return torch.where(largest.isfinite(), sums, math.inf).sqrt().float()


def _largest(rows: Tensor) -> Tensor:
    """Return the largest value, or infinity if one is not a number."""
    return rows.amax().nan_to_num(math.inf, posinf=math.inf) if len(rows) else rows.new_zeros(())


def _row_squares(x: Tensor) -> Tensor:
    """Return the squared norms of the rows in float32; a vector has rows of one element."""
    return ops.square_sum(x.flatten(1) if x.dim() > 1 else x.reshape(-1, 1))
