"""Register the C++ kernels of `adamw`."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu

cpu(ops.adamw)
