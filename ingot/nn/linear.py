"""A linear layer on `ops.linear`, which is batch-invariant: `torch.nn.Linear` is not.

The bits of a row do not depend on the other rows. So a decoder of batch-invariant layers computes
the same bits for a token in training, prefill and decode.

Legend: T tokens, D channels, V vocabulary.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ingot import ops
from ingot.nn.lora import LoraAdapter, LoraSlots
from ingot.ops.epilogue import IDENTITY

STD = 0.02  # of initial weights, as in GPT-2 and Llama


def init_normal_(weight: Tensor) -> None:
    """Initialize a weight from N(0, 0.02), unless it is on `meta`.

    There `normal_` has no effect but imports torch._dynamo, which takes 2 s when a model is loaded.
    """
    if not weight.is_meta:
        nn.init.normal_(weight, std=STD)


class LMHead:
    """What an LM head computes, by a linear layer or by the embedding that is tied to it."""

    weight: nn.Parameter

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return `hidden @ weight.T`, (T, V), in float32."""
        return ops.linear_logits(hidden_TD, self.weight)

    def logprobs(self, hidden_TD: Tensor, tokens_T: Tensor) -> Tensor:
        """Return the log-probability of each token, (T,), in float32."""
        return ops.linear_token_logprobs(hidden_TD, self.weight, tokens_T)


class Linear(LMHead, nn.Linear):
    """`torch.nn.Linear` on `ops.linear`, with its epilogue: an activation and a residual.

    >>> layer = Linear(8, 4)
    >>> layer(torch.ones(2, 8), residual=torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.lora: LoraAdapter | LoraSlots | None = None
        self.compute: Callable[..., Tensor] | None = None
        """Computes the layer instead of `ops.linear`: see `ingot.nn.qat` and
        `ingot.parallel`."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weight and of the activations."""
        return self.weight.dtype

    def reset_parameters(self) -> None:
        """Initialize the weight from N(0, 0.02) and the bias to 0."""
        init_normal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(
        self,
        input: Tensor,
        residual: Tensor | None = None,
        activation: int = IDENTITY,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """Compute `residual + activation(input @ weight.T + bias)`.

        `adapters` selects the LoRA adapter of each row, if the layer has any.
        """
        if self.compute is not None:
            return self.compute(input, [self.weight], self.bias, activation, residual)
        term = None if self.lora is None else self.lora(input, adapters)
        if term is None:
            return ops.linear(input, self.weight, self.bias, activation, residual)
        h, (b,), index = term
        return ops.linear(input, self.weight, self.bias, activation, residual, h, b, index)


class Embedding(LMHead, nn.Module):
    """A table of embeddings on `ops.embedding`.

    >>> Embedding(16, 4)(torch.tensor([3, 5])).shape
    torch.Size([2, 4])
    """

    def __init__(self, num_embeddings: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, dim))
        init_normal_(self.weight)

    def forward(self, indices: Tensor) -> Tensor:
        """Look up the rows of these indices."""
        return ops.embedding(indices, self.weight)
