"""`norm` in C++."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu

for _op in (ops.rms_norm, ops.layer_norm):
    cpu(_op)
for _op in (ops.add_rms_norm, ops.add_layer_norm):
    cpu(_op)
