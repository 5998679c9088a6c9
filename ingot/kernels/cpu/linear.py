"""`linear` in C++. Gradients are C++ in bfloat16; in float32 they are MKL's GEMMs."""

from __future__ import annotations

from torch import Tensor

from ingot import ops
from ingot.kernels.cpu.build import cpu, in_bf16


def _has_backward(x: Tensor, *args: Tensor | int | None) -> bool:
    """Return whether a call is in bfloat16, without LoRA adapters or with a single one."""
    lora_b, lora_index = args[-2:]
    single = not isinstance(lora_b, Tensor) or len(lora_b) == 1
    return in_bf16(x) and single and lora_index is None


cpu(ops.linear, backward=_has_backward)
cpu(ops.gated_linear, backward=_has_backward)
cpu(ops.grouped_linear)
cpu(ops.grouped_gated_linear)
for _op in (ops.linear_preact_grad, ops.gated_linear_preact_grad, ops.gated_linear_input_grad):
    cpu(_op)
