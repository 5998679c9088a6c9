"""The decoder: one module for every family, trained, compressed and served as it is.

    forward(tokens_T, layout) -> hidden_TD

takes packed tokens and gives the normalized state of each; `logits` makes scores of it, and the
losses of `ops` take it with `lm_head_weight`, so that nobody makes the logits of a whole batch.

A decoder is made on `meta` first and gets its memory once: `Decoder.from_config` fills it with
random weights, `ingot.interop.hf.load` with those of a file.

Legend: T tokens, D channels, V vocabulary.
"""

# pyright: basic
from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ingot import ops
from ingot.nn.attention import Attention
from ingot.nn.config import Activation, DecoderConfig, NormKind, NormPosition
from ingot.nn.dropout import Dropout
from ingot.nn.layout import BatchLayout, KVSpec
from ingot.nn.linear import STD, Embedding, Linear
from ingot.nn.mlp import MLP, MoE, SwiGLU
from ingot.nn.norm import LayerNorm, RMSNorm


def _norm(config: DecoderConfig) -> RMSNorm | LayerNorm:
    kind = RMSNorm if config.norm is NormKind.RMS else LayerNorm
    return kind(config.dim, config.norm_eps)


def _mlp(config: DecoderConfig, layer: int) -> MLP | SwiGLU | MoE:
    if config.moe and config.is_moe_layer[layer]:
        return MoE(config.dim, config.moe)
    if config.activation is Activation.SWIGLU:
        return SwiGLU(config.dim, config.ffn_dim)
    return MLP(config.dim, config.ffn_dim, config.activation, config.mlp_bias)


class Block(nn.Module):
    """One layer: attention, then the MLP, each added to the stream that runs through."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.post_norm = config.norm_position is NormPosition.POST
        self.attention = Attention(
            config.dim,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            layer=layer,
            rope=config.rope,
            sliding_window=config.window_per_layer[layer],
            qk_norm=config.qk_norm,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            eps=config.norm_eps,
        )
        self.attention_norm = _norm(config)
        self.mlp = _mlp(config, layer)
        self.mlp_norm = _norm(config)
        self.residual_dropouts: nn.ModuleList | None = None

    def forward(self, x_TD: Tensor, layout: BatchLayout) -> Tensor:
        """The stream behind this layer."""
        if self.residual_dropouts is not None and self.training:
            return self._forward_dropout(x_TD, layout, *self.residual_dropouts)
        if self.post_norm:
            x_TD = x_TD + self.attention_norm(self.attention(x_TD, layout))
            return x_TD + self.mlp_norm(self.mlp(x_TD))
        x_TD = self.attention(self.attention_norm(x_TD), layout, residual=x_TD)
        return self.mlp(self.mlp_norm(x_TD), residual=x_TD)

    def _forward_dropout(
        self, x_TD: Tensor, layout: BatchLayout, first: nn.Module, second: nn.Module
    ) -> Tensor:
        """The same, some of what the branches add left out."""
        if self.post_norm:
            x_TD = x_TD + first(self.attention_norm(self.attention(x_TD, layout)))
            return x_TD + second(self.mlp_norm(self.mlp(x_TD)))
        x_TD = x_TD + first(self.attention(self.attention_norm(x_TD), layout))
        return x_TD + second(self.mlp(self.mlp_norm(x_TD)))


class Decoder(nn.Module):
    """A decoder-only language model, whatever its family.

    >>> from ingot.nn import preset
    >>> model = Decoder.from_config(preset("tiny"), seed=0)
    >>> layout = BatchLayout.packed([3, 2])
    >>> hidden = model(torch.tensor([1, 2, 3, 4, 5]), layout)
    >>> model.logits(hidden).shape
    torch.Size([5, 256])
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.source_config: dict[str, Any] | None = None
        """What the file it was read from says, kept for the file it will be written to."""
        self.tok_embed = Embedding(config.vocab_size, config.dim)
        self.pos_embed = None if config.rope else Embedding(config.max_seq_len, config.dim)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = _norm(config)
        self.lm_head = None if config.tie_embeddings else Linear(config.dim, config.vocab_size)

    @staticmethod
    def from_config(
        config: DecoderConfig,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> Decoder:
        """A decoder with fresh weights."""
        decoder = Decoder.on_meta(config, dtype).to_empty(device=device)
        decoder.init(seed)
        return decoder

    @staticmethod
    def on_meta(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Decoder:
        """A decoder on `meta`: shapes and no memory. `to_empty` gives it some."""
        with torch.device("meta"):
            return Decoder(config).to(dtype)

    def init(self, seed: int) -> None:
        """Fresh weights: normal; those that add to the stream scaled down by the depth.

        So the stream's variance does not grow with the number of layers (GPT-2).
        """
        random = torch.Generator(self.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            kind = name.rpartition(".")[2]
            if "norm" in name and kind == "weight":
                nn.init.ones_(parameter)
            elif kind == "bias":
                nn.init.zeros_(parameter)
            else:
                adds = name.endswith((".out.weight", ".down.weight", ".down"))
                std = STD / math.sqrt(2 * self.config.layers) if adds else STD
                nn.init.normal_(parameter, std=std, generator=random)

    def set_dropout(self, p: float) -> None:
        """Have every branch drop this share of what it adds, in training."""
        for layer, block in enumerate(self.blocks):
            pair = (Dropout(p, 2 * layer), Dropout(p, 2 * layer + 1))
            block.residual_dropouts = nn.ModuleList(pair) if p else None  # pyright: ignore

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.tok_embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.tok_embed.weight.dtype

    @property
    def lm_head_weight(self) -> Tensor:
        """The weight of the vocabulary, (V, D), for `ops.linear_cross_entropy` and its like."""
        return self.tok_embed.weight if self.lm_head is None else self.lm_head.weight

    @property
    def kv_spec(self) -> KVSpec:
        """What it keeps of a token when served."""
        found = KVSpec.of(self.blocks)
        assert found is not None
        return found

    def forward(self, tokens_T: Tensor, layout: BatchLayout) -> Tensor:
        """The normalized state of each token, (T, D)."""
        x_TD = self.tok_embed(tokens_T)
        if self.pos_embed is not None:
            x_TD = x_TD + self.pos_embed(layout.positions)
        for block in self.blocks:
            x_TD = block(x_TD, layout)
        return self.norm(x_TD)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """The scores of the vocabulary, (T, V). Ask for the tokens you need, not for all."""
        return ops.linear(hidden_TD, self.lm_head_weight)

    def logprobs(self, hidden_TD: Tensor, tokens_T: Tensor) -> Tensor:
        """The log-probability of each token behind its state, (T), in float32.

        The one definition: what a server reports and a trainer compares are these bits. They are
        those of `-ops.linear_cross_entropy`, so a loss is a report already. The scores behind them
        are in float32, where `logits` are rounded to the model's dtype.
        """
        return ops.linear_token_logprobs(hidden_TD, self.lm_head_weight, tokens_T)
