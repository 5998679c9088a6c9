"""Register the C++ kernels of `softmax`."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu

for _op in (ops.softmax, ops.log_softmax):
    cpu(_op)
