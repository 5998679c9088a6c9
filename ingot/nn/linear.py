"""A linear layer on `ops.linear`, which is exact: `torch.nn.Linear` is not.

Its result for a row does not depend on the other rows. So a decoder of exact layers gives a token
the same bits whether it was trained on, prefilled or decoded.
"""

# pyright: basic
from __future__ import annotations

import torch
from torch import Tensor, nn

from ingot import ops

STD = 0.02  # of fresh weights, as GPT-2's and Llama's


def init_normal_(weight: Tensor) -> None:
    """Fill a weight with normal values; one on `meta` is left alone.

    There `normal_` would do nothing either, but import torch._dynamo: 2 s when a model is loaded.
    """
    if not weight.is_meta:
        nn.init.normal_(weight, std=STD)


class Linear(nn.Linear):
    """`torch.nn.Linear` on `ops.linear`; a residual is added in the same pass if given.

    >>> layer = Linear(8, 4)
    >>> layer(torch.ones(2, 8), residual=torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """Normal weights, no bias."""
        init_normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """`residual + input @ weight.T + bias`."""
        if residual is None:
            return ops.linear(input, self.weight, self.bias)
        return ops.linear_residual(input, self.weight, residual, self.bias)


class Embedding(nn.Module):
    """`ops.embedding` with its table.

    >>> Embedding(16, 4)(torch.tensor([3, 5])).shape
    torch.Size([2, 4])
    """

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim))
        init_normal_(self.weight)

    def forward(self, indices: Tensor) -> Tensor:
        """The rows of these indices."""
        return ops.embedding(indices, self.weight)
