"""The encoder: BERT and its relatives, on packed tokens like the decoder.

    forward(tokens_T, layout, token_types_T) -> hidden_TD

A token attends to all tokens of its sequence. Positions and token types have learned embeddings;
each sublayer is followed by a LayerNorm of the residual stream (post-norm). An encoder keeps
nothing between calls: it has no KV cache.

The hidden state of a token has the same bits whatever else is in the batch. `ingot.nn.pooling`
turns hidden states into embeddings of sequences.

Legend: T tokens, D channels.
"""

# pyright: basic
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ingot.nn.attention import Attention
from ingot.nn.config import EncoderConfig
from ingot.nn.layout import BatchLayout
from ingot.nn.linear import STD, Embedding
from ingot.nn.mlp import MLP
from ingot.nn.norm import LayerNorm


class EncoderBlock(nn.Module):
    """One layer: attention, then the MLP, with a norm after each is added to its input."""

    def __init__(self, config: EncoderConfig, layer: int) -> None:
        super().__init__()
        self.attention = Attention(
            config.dim,
            heads=config.heads,
            layer=layer,
            qkv_bias=True,
            o_bias=True,
            causal=False,
        )
        self.attention_norm = LayerNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config.dim, config.ffn_dim, config.activation, bias=True)
        self.mlp_norm = LayerNorm(config.dim, config.norm_eps)

    def forward(self, x_TD: Tensor, layout: BatchLayout) -> Tensor:
        """Return the residual stream after this layer, (T, D)."""
        x_TD = self.attention_norm(self.attention(x_TD, layout, residual=x_TD))
        return self.mlp_norm(self.mlp(x_TD, residual=x_TD))


class Encoder(nn.Module):
    """A bidirectional encoder of the BERT family.

    >>> config = EncoderConfig(
    ...     vocab_size=256, dim=64, layers=2, heads=4, ffn_dim=128, max_seq_len=512
    ... )
    >>> model = Encoder.from_config(config, seed=0)
    >>> model(torch.tensor([1, 2, 3, 4, 5]), BatchLayout.packed([3, 2])).shape
    torch.Size([5, 64])
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.source_config: dict[str, Any] | None = None
        """The config.json it was loaded from; `hf.save_encoder` keeps its keys."""
        self.tok_embed = Embedding(config.vocab_size, config.dim)
        self.pos_embed = Embedding(config.max_seq_len, config.dim)
        self.type_embed = Embedding(config.type_vocab_size, config.dim)
        self.norm = LayerNorm(config.dim, config.norm_eps)
        self.blocks = nn.ModuleList(EncoderBlock(config, layer) for layer in range(config.layers))

    @staticmethod
    def from_config(
        config: EncoderConfig,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Encoder:
        """Build an encoder with randomly initialized weights."""
        encoder = Encoder.on_meta(config, dtype).to_empty(device=device)
        encoder.init(seed)
        return encoder

    @staticmethod
    def on_meta(config: EncoderConfig, dtype: torch.dtype = torch.float32) -> Encoder:
        """Build an encoder on `meta`, without memory; `to_empty` allocates it."""
        with torch.device("meta"):
            return Encoder(config).to(dtype)

    def init(self, seed: int) -> None:
        """Initialize the weights: N(0, 0.02), biases 0, norms 1."""
        random = torch.Generator(self.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            kind = name.rpartition(".")[2]
            if kind == "bias":
                nn.init.zeros_(parameter)
            elif "norm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=STD, generator=random)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and activations."""
        return self.norm.weight.dtype

    def forward(
        self, tokens_T: Tensor, layout: BatchLayout, token_types_T: Tensor | None = None
    ) -> Tensor:
        """Return the hidden state of each token, (T, D); by default all are of token type 0."""
        types = (
            self.type_embed.weight[0] if token_types_T is None else self.type_embed(token_types_T)
        )
        x_TD = self.norm(self.tok_embed(tokens_T) + types + self.pos_embed(layout.positions))
        for block in self.blocks:
            x_TD = block(x_TD, layout)
        return x_TD
