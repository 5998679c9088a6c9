"""Learning-rate schedules: the factor of the peak rate, a pure function of the step.

    warm-up      (s + 1) / w                                  for s < w
    constant     1
    linear       1 - (1 - f) p
    polynomial   f + (1 - f) (1 - p)^a
    cosine       f + (1 - f) (1 + cos(pi p)) / 2              (Loshchilov & Hutter 2016)
    wsd          1 while p < 1 - d, then linear down to f     (warm-up, stable, decay;
                                                              Hu et al. 2024)

s is the step, from 0, w the number of warm-up steps, f is `min_lr_ratio`, d is `decay_ratio`, and p
rises from 0 at the first step after the warm-up to 1 at the last. A schedule has no state, so
nothing is saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LRSchedule:
    """The learning rate over a run, relative to its peak.

    >>> half = LRSchedule(kind="cosine", warmup_steps=2, min_lr_ratio=0.0)
    >>> [round(half.lr_factor(step, 7), 2) for step in range(7)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15, 0.0]
    """

    kind: Literal["constant", "cosine", "linear", "polynomial", "wsd"] = "cosine"
    """Shape of the schedule after the warm-up."""
    warmup_steps: int = 0
    """Steps of linear warm-up to the peak rate."""
    min_lr_ratio: float = 0.1
    """Factor of the last step, relative to the peak; unused by `constant`."""
    power: float | None = None
    """Exponent of `polynomial`; 2 by default."""
    decay_ratio: float | None = None
    """Fraction of the steps after the warm-up in which `wsd` decays; 0.2 by default."""

    def __post_init__(self) -> None:
        check_bounds(self, warmup_steps=(0, 10**9), min_lr_ratio=(0.0, 1.0))
        for name, least, most, shape in (
            ("power", 0, 100, "polynomial"),
            ("decay_ratio", 0, 1, "wsd"),
        ):
            if getattr(self, name) is None:
                continue
            check_bounds(self, **{name: (least, most)})
            if self.kind != shape:
                raise ConfigError(
                    f"{name}: only applies to kind '{shape}', got '{self.kind}'",
                    hint=f"remove {name}",
                )

    def lr_factor(self, step: int, steps: int) -> float:
        """Return the factor of the peak learning rate at a step, of `steps` in total."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, steps - 1 - self.warmup_steps))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * self._height(done)

    def _height(self, done: float) -> float:
        """Return the height of the curve, from 1 down to 0."""
        match self.kind:
            case "constant":
                return 1.0
            case "cosine":
                return (1 + math.cos(math.pi * done)) / 2
            case "linear":
                return 1 - done
            case "polynomial":
                return (1 - done) ** (2.0 if self.power is None else self.power)
            case "wsd":
                share = 0.2 if self.decay_ratio is None else self.decay_ratio
                return min(1.0, (1 - done) / share) if share else 1.0
