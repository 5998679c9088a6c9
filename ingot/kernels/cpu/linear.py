"""Register the C++ kernels of `linear`, with gradients in bfloat16."""

from __future__ import annotations

from ingot import ops
from ingot.kernels.cpu.build import cpu, in_bf16

cpu(ops.linear, backward=in_bf16)
cpu(ops.linear_gelu, backward=in_bf16)
cpu(ops.linear_gelu_tanh, backward=in_bf16)
cpu(ops.linear_silu, backward=in_bf16)
cpu(ops.linear_relu, backward=in_bf16)
cpu(ops.linear_residual, backward=in_bf16)
cpu(ops.linear_swiglu, backward=in_bf16)
cpu(ops.grouped_linear)
cpu(ops.grouped_swiglu)
