"""RMSNorm and LayerNorm modules on ops."""

# pyright: basic
from __future__ import annotations

import torch
from torch import Tensor, nn

from ingot import ops


class RMSNorm(nn.Module):
    """RMSNorm with a weight, on `ops.rms_norm`.

    >>> RMSNorm(4)(torch.ones(1, 4)).shape
    torch.Size([1, 4])
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return ops.rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm with a weight and a bias, on `ops.layer_norm`.

    >>> LayerNorm(4)(torch.ones(1, 4)).shape
    torch.Size([1, 4])
    """

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)
