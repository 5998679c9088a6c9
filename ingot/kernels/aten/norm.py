"""`norm` by `torch.nn.functional`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten


@aten(ops.rms_norm)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """One fused call."""
    return F.rms_norm(x, weight.shape, weight, eps).contiguous()


@aten(ops.layer_norm)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """One fused call."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


@aten(ops.add_rms_norm)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """A sum and a fused norm."""
    total = (x + residual).contiguous()
    return rms_norm(total, weight, eps), total


@aten(ops.add_layer_norm)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """A sum and a fused norm."""
    total = (x + residual).contiguous()
    return layer_norm(total, weight, bias, eps), total
