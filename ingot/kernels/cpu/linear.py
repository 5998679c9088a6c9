"""`linear` in C++; gradients are ATen's GEMMs."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu

cpu(ops.linear, backward=True)
cpu(ops.linear_gelu, backward=True)
cpu(ops.linear_gelu_tanh, backward=True)
cpu(ops.linear_silu, backward=True)
cpu(ops.linear_relu, backward=True)
cpu(ops.linear_residual, backward=True)
cpu(ops.linear_swiglu, backward=True)
cpu(ops.grouped_linear)
cpu(ops.grouped_swiglu)
