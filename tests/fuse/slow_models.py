"""Models with one fault each, which `ingot explain` has to name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS = 64, 4


class Block(nn.Module):
    """A block of a transformer with a fault, or none."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(512, 512).tril().bool())
        if fault == "strided":
            for layer in (self.qkv, self.out):
                layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.fault == "float64":
            scale: Any = self.scale
            x = F.gelu(x * scale).exp().log1p().float()
        q, k, v = (
            t.view(batch, length, HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        if self.fault == "dense":
            mask: Any = self.mask
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:length, :length])
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, DIM))


def float64() -> tuple[nn.Module, tuple[Tensor]]:
    return Block("float64"), (torch.randn(4, 64, DIM),)


def dense() -> tuple[nn.Module, tuple[Tensor]]:
    return Block("dense"), (torch.randn(1, 256, DIM),)


def strided() -> tuple[nn.Module, tuple[Tensor]]:
    return Block("strided"), (torch.randn(1, 32, DIM),)


def healthy() -> tuple[nn.Module, tuple[Tensor]]:
    return Block("none"), (torch.randn(1, 32, DIM),)


def nothing() -> int:
    return 3
