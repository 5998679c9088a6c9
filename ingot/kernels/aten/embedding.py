"""`embedding` with `torch.nn.functional`. It copies rows, so it is batch-invariant."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.kernels.aten import aten


@aten(ops.embedding, batch_invariant=True)
def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Make one fused call."""
    return F.embedding(tokens, weight)
