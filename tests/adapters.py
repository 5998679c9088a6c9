"""LoRA adapters for tests, of random weights that change what a model writes."""

from __future__ import annotations

from pathlib import Path

import torch

from ingot.interop import peft
from ingot.nn import Decoder
from ingot.nn.lora import LoraConfig


def adapter(
    decoder: Decoder,
    seed: int,
    rank: int = 4,
    targets: tuple[str, ...] = ("",),
    dtype: torch.dtype | None = None,
) -> peft.Adapter:
    """Return an adapter of the layers whose names end with one of `targets`."""
    numbers, weights = torch.Generator().manual_seed(seed), {}
    dtype = dtype or decoder.dtype
    for name, layer in peft.target_layers(decoder).items():
        if name.endswith(targets):
            a = torch.randn(rank, layer.in_features, generator=numbers) / layer.in_features**0.5
            b = 0.1 * torch.randn(layer.out_features, rank, generator=numbers)
            weights[name] = a.to(dtype), b.to(dtype)
    names = sorted({name.rpartition(".")[2] for name in weights})
    return peft.Adapter(peft.new_config(LoraConfig(rank=rank, alpha=2.0 * rank), names), weights)


def save(decoder: Decoder, directory: Path, seed: int, rank: int = 4) -> Path:
    """Save a random adapter as a PEFT directory."""
    peft.save(adapter(decoder, seed, rank), directory)
    return directory
