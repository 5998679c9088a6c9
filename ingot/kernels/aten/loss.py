"""Losses with `torch.nn.functional`, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten
from ingot.ops.arguments import accum_dtype


def _supports(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> bool:
    return z_loss == 0.0 and logits.dim() == 2 and targets.dtype == torch.int64


@aten(ops.cross_entropy, supports=_supports)
def cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    """Make one fused call."""
    return F.cross_entropy(
        logits.to(accum_dtype(logits.dtype)),
        targets,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
