"""Softmax with `torch.nn.functional`, for calls without mask and scale."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten


def _unmasked(x: Tensor, scale: float, mask: Tensor | None) -> bool:
    return mask is None and scale == 1.0


@aten(ops.softmax, supports=_unmasked)
def softmax(x: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Make one fused call."""
    return F.softmax(x, dim=-1).contiguous()


@aten(ops.log_softmax, supports=_unmasked)
def log_softmax(x: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """Make one fused call."""
    return F.log_softmax(x, dim=-1).contiguous()
