"""Register the C++ kernels of `embedding`."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu
from ingot.ops.dispatch import always

cpu(ops.embedding, backward=always)
