"""Register the C++ kernels of rotary position embedding."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu

cpu(ops.rope)
cpu(ops.rope_and_cache)
