"""`lora` in C++. Gradients are C++ in bfloat16, for one adapter."""

from __future__ import annotations

from torch import Tensor

from ingot import ops
from ingot.kernels.cpu.build import cpu, in_bf16


def _has_one_adapter(x: Tensor, a: Tensor, scale: Tensor, index: Tensor | None) -> bool:
    return in_bf16(x) and index is None and len(a) == 1


cpu(ops.lora_shrink, backward=_has_one_adapter)
