"""Compress a model: methods that quantize its weights.

    quantize(decoder, Int4(group=32), RoundToNearest())
    quantize(decoder, Int4(group=32), GPTQ(), sequences)      # calibrated on tokens
    quantize(decoder, Int4(group=32), AWQ(rounding=GPTQ()), sequences)

`ingot.compress` does this for a model directory.
"""

from __future__ import annotations

from ingot.compression.gptq import GPTQ
from ingot.compression.method import Method, RoundToNearest
from ingot.compression.mixed_precision import (
    Upgrade,
    choose_upgrades,
    measure_error_reductions,
)
from ingot.compression.quantize import LayerSensitivity, quantize
from ingot.compression.smoothing import AWQ, SmoothQuant

__all__ = [
    "AWQ",
    "GPTQ",
    "LayerSensitivity",
    "Method",
    "RoundToNearest",
    "SmoothQuant",
    "Upgrade",
    "choose_upgrades",
    "measure_error_reductions",
    "quantize",
]
