"""What a recipe asks of the forecasts of its run (`ingot.workflows.forecast`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ingot.core.config import check_bounds


@dataclass(frozen=True, kw_only=True)
class ForecastConfig:
    """Forecasts of a run while it trains.

    >>> ForecastConfig(target_loss=2.2).target_loss
    2.2
    """

    target_loss: float | None = None
    """Loss whose time of arrival is logged."""
    alarm: Literal["off", "note", "checkpoint", "lower_lr"] = "note"
    """When the run is likely to diverge: log a warning, and write a checkpoint, or halve the
    learning rate from then on."""

    def __post_init__(self) -> None:
        if self.target_loss is not None:
            check_bounds(self, target_loss=(1e-9, 1e9))
