"""A recurrent language model: gated recurrent units (Cho et al. 2014) over packed tokens.

    forward(tokens_T, layout) -> hidden_TD

as the decoder's, so that the same training step serves both. The recurrence is `ingot.ops.gru`: a
sequence has the same bits in any batch, and a compiled model has one graph.

Legend: T tokens, N sequences, D channels, V vocabulary.
"""

# pyright: basic
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ingot import ops
from ingot.core.config import check_bounds
from ingot.nn.layout import BatchLayout
from ingot.nn.linear import STD, Embedding
from ingot.nn.norm import RMSNorm


@dataclass(frozen=True, kw_only=True)
class GRUConfig:
    """Size of a `GRU`."""

    kind: Literal["gru"] = "gru"
    vocab_size: int
    """Number of token ids."""
    dim: int
    """Width of the embeddings and of the recurrent state."""
    layers: int = 1
    """Number of recurrent layers."""
    max_seq_len: int = 2**20
    """Maximum sequence length; the recurrence itself has none."""

    def __post_init__(self) -> None:
        check_bounds(
            self, vocab_size=(1, 2**22), dim=(1, 2**16), layers=(1, 2**8), max_seq_len=(1, 2**27)
        )


class RecurrentLayers(nn.Module):
    """A stack of recurrent layers of one width, with the names and the convention of `nn.GRU`.

    >>> layers = RecurrentLayers(dim=8, layers=2)
    >>> [name for name, _ in layers.named_parameters()][:2]
    ['weight_ih_l0', 'weight_hh_l0']
    """

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.dim, self.layers = dim, layers
        for layer in range(layers):
            for name, shape in {
                "weight_ih": (3 * dim, dim),
                "weight_hh": (3 * dim, dim),
                "bias_ih": (3 * dim,),
                "bias_hh": (3 * dim,),
            }.items():
                self.register_parameter(f"{name}_l{layer}", nn.Parameter(torch.empty(shape)))

    def forward(self, x_TD: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Return the states (T, D) of the last layer; sequences begin with a state of zeros."""
        initial_ND = x_TD.new_zeros(len(cu_seqlens) - 1, self.dim)
        for layer in range(self.layers):
            weights = [
                getattr(self, f"{name}_l{layer}")
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            ]
            x_TD = ops.gru(x_TD, initial_ND, cu_seqlens, *weights)
        return x_TD


class GRU(nn.Module):
    """A recurrent language model with tied embeddings.

    >>> model = GRU.from_config(GRUConfig(vocab_size=16, dim=8), seed=0)
    >>> layout = BatchLayout.packed([3, 2])
    >>> model(torch.arange(5), layout).shape
    torch.Size([5, 8])
    """

    def __init__(self, config: GRUConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embed = Embedding(config.vocab_size, config.dim)
        self.units = RecurrentLayers(config.dim, config.layers)
        self.norm = RMSNorm(config.dim)

    @staticmethod
    def from_config(config: GRUConfig, *, seed: int) -> GRU:
        """Build a model with randomly initialized weights."""
        model, random = GRU(config), torch.Generator().manual_seed(seed)
        bound = 1 / math.sqrt(config.dim)
        with torch.no_grad():
            for parameter in model.units.parameters():
                parameter.uniform_(-bound, bound, generator=random)
            model.tok_embed.weight.normal_(std=STD, generator=random)
        return model

    @property
    def lm_head_weight(self) -> Tensor:
        """Weight of the LM head, (V, D): the token embedding."""
        return self.tok_embed.weight

    def forward(self, tokens_T: Tensor, layout: BatchLayout) -> Tensor:
        """Return the normalized hidden state of each token, (T, D)."""
        return self.norm(self.units(self.tok_embed(tokens_T), layout.cu_seqlens))
