"""A stack of dense layers: features in, logits out."""

# pyright: basic
from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from ingot import ops
from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError
from ingot.nn.dropout import Dropout
from ingot.nn.linear import Linear

M = TypeVar("M", bound=nn.Module)


_GELU = int(ops.ActivationFn.GELU)


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """Dense layers of these widths, with GELU between them."""

    kind: Literal["dense"] = "dense"
    in_features: int
    """Number of input features."""
    hidden_dims: tuple[int, ...]
    """Widths of the hidden layers; may be empty."""
    out_features: int
    """Number of output features."""
    dropout: float = 0.0
    """Dropout probability in training."""

    def __post_init__(self) -> None:
        check_bounds(self, in_features=(1, 2**24), out_features=(1, 2**22), dropout=(0.0, 0.99))
        if (
            not all(1 <= width <= 2**20 for width in self.hidden_dims)
            or len(self.hidden_dims) > 2**10
        ):
            raise ConfigError(
                f"hidden_dims is {self.hidden_dims}"[:200],
                hint="give up to 1,024 widths of at least 1",
            )


class Dense(nn.Module):
    """Dense layers on batch-invariant ops; all dimensions of x after the first are features.

    >>> config = DenseConfig(in_features=2, hidden_dims=(8,), out_features=3)
    >>> Dense.from_config(config, seed=0)(torch.ones(4, 2)).shape
    torch.Size([4, 3])
    """

    def __init__(self, config: DenseConfig) -> None:
        super().__init__()
        self.config = config
        widths = (config.in_features, *config.hidden_dims, config.out_features)
        self.layers = nn.ModuleList(Linear(a, b, bias=True) for a, b in pairwise(widths))
        self.dropouts = nn.ModuleList(
            Dropout(config.dropout, layer) for layer in range(len(config.hidden_dims))
        )

    @staticmethod
    def from_config(config: DenseConfig, *, seed: int) -> Dense:
        """Build a model with randomly initialized weights."""
        return kaiming_init_(Dense(config), seed)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each sample, (B, out_features)."""
        x = x.flatten(1).to(self.layers[0].weight.dtype)  # pyright: ignore
        *hidden, last = self.layers
        for layer, dropout in zip(hidden, self.dropouts, strict=True):
            x = dropout(layer(x, activation=_GELU))  # pyright: ignore
        return last(x)


def kaiming_init_(model: M, seed: int) -> M:
    """Initialize weights from N(0, 2 / fan_in) (He et al. 2015), biases to 0 and norms to 1.

    >>> round(kaiming_init_(nn.Linear(200, 100), 0).weight.std().item(), 2)
    0.1
    """
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                std = math.sqrt(2 / parameter[0].numel())
                parameter.normal_(std=std, generator=random)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    return model
