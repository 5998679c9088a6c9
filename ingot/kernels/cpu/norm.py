"""Register the C++ kernels of `norm`."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu
from ingot.ops.dispatch import always

for _op in (ops.rms_norm, ops.layer_norm):
    cpu(_op, backward=always)
cpu(ops.square_sum)
for _op in (ops.add_rms_norm, ops.add_layer_norm):
    cpu(_op, backward=always)
