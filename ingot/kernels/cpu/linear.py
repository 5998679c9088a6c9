"""`linear` in C++; gradients are ATen's GEMMs."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu

cpu(ops.linear)
cpu(ops.linear_gelu)
cpu(ops.linear_gelu_tanh)
cpu(ops.linear_silu)
cpu(ops.linear_relu)
cpu(ops.linear_residual)
cpu(ops.linear_swiglu)
cpu(ops.grouped_linear)
cpu(ops.grouped_swiglu)
