"""Register the C++ kernels of `activation`."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu

for _op in (ops.gelu, ops.gelu_tanh, ops.silu, ops.relu_squared):
    cpu(_op)
for _op in (ops.swiglu, ops.geglu, ops.geglu_tanh):
    cpu(_op)
