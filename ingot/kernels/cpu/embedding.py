"""Register the C++ kernels of embedding lookup."""

from __future__ import annotations

import torch
from torch import Tensor

from ingot import ops
from ingot.kernels.cpu.build import cpu
from ingot.ops.dispatch import always


def _supports_scale(tokens: Tensor, weight: Tensor, scale: Tensor, *_: object) -> bool:
    return scale.dtype != torch.float64


cpu(ops.embedding, backward=always)
cpu(ops.embedding_int8, supports_dtypes=_supports_scale)
cpu(ops.embedding_int4, supports_dtypes=_supports_scale)
