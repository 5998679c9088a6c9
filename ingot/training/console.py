"""The progress of a training run on the console."""

# pyright: basic
from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from ingot.core import log

_SHOWN = ("rewards/accuracies", "rewards/margins")  # of the objective's metrics
_LOG_EVERY_S = 10.0  # between log lines without a progress bar


class ConsoleLogger:
    """Logs progress: in the progress bar, or as a line every few seconds without one.

    `unit` is what a batch is counted in, `peak_share` the share of the machine's peak that one of
    them per second is, if it is known.
    """

    def __init__(
        self,
        name: str,
        steps: int,
        device: torch.device,
        *,
        unit: str,
        peak_share: float | None = None,
    ) -> None:
        self._name, self._steps, self._device = name, steps, device
        self._unit, self._peak_share = unit, peak_share
        self._last, self._rate = time.monotonic(), 0.0

    def log(self, metrics: dict[str, Any], bar: log.Progress) -> None:
        """Show the metrics of a step."""
        rate = metrics["num_rows"] / max(metrics["seconds"], 1e-9)
        self._rate = rate if not self._rate else 0.9 * self._rate + 0.1 * rate
        text = self._format(metrics)
        bar.describe(f"{self._name} {text}")
        if time.monotonic() - self._last > _LOG_EVERY_S and not log.stderr().is_terminal:
            self._last = time.monotonic()
            log.logger(__name__).info("step %d of %d: %s", metrics["step"], self._steps, text)

    def _format(self, metrics: dict[str, Any]) -> str:
        parts = [
            f"loss {metrics['loss']:.4g}",
            f"lr {metrics['lr']:.2g}",
            f"grad norm {metrics['grad_norm']:.2g}",
            *(f"{name} {metrics[name]:.3g}" for name in _SHOWN if name in metrics),
            f"{self._rate:,.0f} {self._unit}/s",
        ]
        if self._peak_share:
            parts.append(f"{self._rate * self._peak_share:.0%} of peak")
        return "  ".join([*parts, f"{_used_memory(self._device) / 1e9:.1f} GB"])


def _used_memory(device: torch.device) -> int:
    """Return the bytes in use: allocated on an accelerator, or else the resident set size."""
    if device.type != "cpu":
        allocated = getattr(torch.get_device_module(device), "memory_allocated", None)
        return int(allocated(device)) if allocated else 0
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
