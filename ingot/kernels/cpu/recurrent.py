"""Register the C++ kernels of `recurrent`, forward and backward."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu
from ingot.ops.dispatch import always

for _op in (ops.gru_cell, ops.gru, ops.gru_rollout, ops.rssm_step):
    cpu(_op, backward=always)
