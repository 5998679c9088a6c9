"""`attention` in C++; gradients are ATen's."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu

cpu(ops.attention)
