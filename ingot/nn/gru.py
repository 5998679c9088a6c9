"""A recurrent language model: gated recurrent units (Cho et al. 2014) over packed tokens.

    forward(tokens_T, layout) -> hidden_TD

as the decoder's, so that the same training step serves both. The recurrence is torch's and not
batch-invariant.

Legend: T tokens, D channels, V vocabulary.
"""

# pyright: basic
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

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
        self.units = nn.GRU(config.dim, config.dim, config.layers)
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
        lengths = layout.cu_seqlens.diff().tolist()
        sequences = [s for s in self.tok_embed(tokens_T).split(lengths) if len(s)]
        hidden, _ = self.units(pack_sequence(sequences, enforce_sorted=False))
        return self.norm(torch.cat(unpack_sequence(hidden)))
