"""`sample` in C++."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu

cpu(ops.penalize)
cpu(ops.truncate)
cpu(ops.uniform)
cpu(ops.sample)
