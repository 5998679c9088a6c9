"""`linear` in C++. Gradients are C++ in bfloat16; in float32 they are MKL's GEMMs."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu, in_bf16

cpu(ops.linear, backward=in_bf16)
cpu(ops.gated_linear, backward=in_bf16)
cpu(ops.grouped_linear)
cpu(ops.grouped_gated_linear)
