"""`activation` by `torch.nn.functional`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten


@aten(ops.gelu)
def gelu(x: Tensor) -> Tensor:
    """One fused call."""
    return F.gelu(x).contiguous()


@aten(ops.gelu_tanh)
def gelu_tanh(x: Tensor) -> Tensor:
    """One fused call."""
    return F.gelu(x, approximate="tanh").contiguous()


@aten(ops.silu)
def silu(x: Tensor) -> Tensor:
    """One fused call."""
    return F.silu(x).contiguous()


@aten(ops.swiglu)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """An activation and a product."""
    return (F.silu(gate) * up).contiguous()


@aten(ops.geglu)
def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """An activation and a product."""
    return (F.gelu(gate) * up).contiguous()


@aten(ops.geglu_tanh)
def geglu_tanh(gate: Tensor, up: Tensor) -> Tensor:
    """An activation and a product."""
    return (F.gelu(gate, approximate="tanh") * up).contiguous()
