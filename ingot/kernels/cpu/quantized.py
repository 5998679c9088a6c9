"""Register the C++ kernels of linear layers with quantized weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ingot import ops
from ingot.kernels.cpu.build import cpu


def _supports_dtypes(x: Tensor, weight: Tensor, scale: Tensor, *_: object) -> bool:
    """Return whether x is float32 or bfloat16; scales may be float16, too."""
    return x.dtype in (torch.float32, torch.bfloat16) and scale.dtype != torch.float64


cpu(ops.linear_int8_dynamic, supports_dtypes=_supports_dtypes)
cpu(ops.linear_int4_dynamic, supports_dtypes=_supports_dtypes)
