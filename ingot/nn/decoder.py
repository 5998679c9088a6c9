"""The decoder: one module for all families, used unchanged in training and serving.

    forward(tokens_T, layout) -> hidden_TD

takes packed tokens and returns the normalized hidden state of each. `logits` projects hidden states
to the vocabulary; the losses in `ops` take them with `lm_head_weight`, so that the logits of a
whole batch are never materialized. `ingot.nn.loss` has losses of quantized LM heads, too.

A decoder is built on `meta` and allocated once: `Decoder.from_config` initializes it randomly,
`ingot.interop.hf.load` reads the weights of a directory.

Legend: T tokens, D channels, V vocabulary.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ingot.core.errors import ConfigError, IngotError, UnknownName
from ingot.nn.attention import Attention
from ingot.nn.config import Activation, DecoderConfig, NormKind, NormPosition
from ingot.nn.dropout import Dropout
from ingot.nn.layout import BatchLayout, KVCacheDtype, KVSpec
from ingot.nn.linear import STD, Embedding, Linear, LMHead
from ingot.nn.lora import (
    MAX_LORAS,
    MAX_RANK,
    QKV,
    LoraAdapter,
    LoraConfig,
    LoraKey,
    LoraShape,
    LoraSite,
    LoraSlots,
    LoraWeights,
    select_targets,
)
from ingot.nn.mlp import MLP, MoE, SwiGLU
from ingot.nn.norm import LayerNorm, RMSNorm
from ingot.nn.recompute import RecomputePolicy, recomputable, run


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
    """One layer: attention, then the MLP, each added to the residual stream."""

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
        self.recompute: RecomputePolicy = "none"
        """Which activations to discard in the forward and recompute in the backward."""

    @property
    def lora_sites(self) -> list[LoraSite]:
        """The modules that take LoRA adapters."""
        return [*self.attention.lora_sites, *self.mlp.lora_sites]

    def forward(self, x_TD: Tensor, layout: BatchLayout) -> Tensor:
        """Return the residual stream after this layer, (T, D)."""
        return run(self.recompute, self._forward, x_TD, layout)

    def _forward(self, x_TD: Tensor, layout: BatchLayout) -> Tensor:
        if self.residual_dropouts is not None and self.training:
            return self._forward_dropout(x_TD, layout, *self.residual_dropouts)
        if self.post_norm:
            x_TD = x_TD + self.attention_norm(self.attention(x_TD, layout))
            return x_TD + self.mlp_norm(self.mlp(x_TD, adapters=layout.adapters))
        h_TD = recomputable(self.attention_norm, x_TD)
        x_TD = self.attention(h_TD, layout, residual=x_TD)
        h_TD = recomputable(self.mlp_norm, x_TD)
        return self.mlp(h_TD, residual=x_TD, adapters=layout.adapters)

    def _forward_dropout(
        self, x_TD: Tensor, layout: BatchLayout, first: nn.Module, second: nn.Module
    ) -> Tensor:
        """Compute the layer with dropout on the output of both sublayers."""
        if self.post_norm:
            x_TD = x_TD + first(self.attention_norm(self.attention(x_TD, layout)))
            return x_TD + second(self.mlp_norm(self.mlp(x_TD, adapters=layout.adapters)))
        h_TD = recomputable(self.attention_norm, x_TD)
        x_TD = x_TD + first(self.attention(h_TD, layout))
        h_TD = recomputable(self.mlp_norm, x_TD)
        return x_TD + second(self.mlp(h_TD, adapters=layout.adapters))


class Decoder(nn.Module):
    """A decoder-only language model of any supported family.

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
        """The config.json it was loaded from; `hf.save` keeps its keys."""
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
        """Build a decoder with randomly initialized weights."""
        decoder = Decoder.on_meta(config, dtype).to_empty(device=device)
        decoder.init(seed)
        return decoder

    @staticmethod
    def on_meta(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> Decoder:
        """Build a decoder on `meta`, without memory; `to_empty` allocates it."""
        with torch.device("meta"):
            return Decoder(config).to(dtype)

    def init(self, seed: int) -> None:
        """Initialize the weights: N(0, 0.02); residual projections scaled by 1/sqrt(2 * layers).

        The scale keeps the variance of the residual stream independent of depth (GPT-2).
        """
        random = torch.Generator(self.device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            kind = name.rpartition(".")[2]
            if "norm" in name and kind == "weight":
                nn.init.ones_(parameter)
            elif kind == "bias":
                nn.init.zeros_(parameter)
            else:
                is_residual = name.endswith((".out.weight", ".down.weight", ".down"))
                std = STD / math.sqrt(2 * self.config.layers) if is_residual else STD
                nn.init.normal_(parameter, std=std, generator=random)

    def set_dropout(self, p: float) -> None:
        """Set the dropout probability of the sublayer outputs in training."""
        for layer, block in enumerate(self.blocks):
            pair = (Dropout(p, 2 * layer), Dropout(p, 2 * layer + 1))
            block.residual_dropouts = nn.ModuleList(pair) if p else None  # pyright: ignore

    def set_recompute(self, policy: RecomputePolicy) -> None:
        """Set which activations the blocks discard in training: see `ingot.nn.recompute`."""
        for block in self.blocks:
            block.recompute = policy  # pyright: ignore

    @property
    def kv_cache_dtype(self) -> KVCacheDtype:
        """Dtype of cached keys and values: see `set_kv_cache_dtype`."""
        block: Any = self.blocks[0]
        return block.attention.kv_cache_dtype

    def set_kv_cache_dtype(self, dtype: KVCacheDtype) -> None:
        """Set the dtype of cached keys and values: "auto", that of the activations, or "int8".

        With "int8", a forward without a cache rounds keys and values, too: see
        `ingot.nn.attention`.

        >>> from ingot.nn import preset
        >>> model = Decoder.from_config(preset("tiny"), seed=0)
        >>> model.set_kv_cache_dtype("int8")
        >>> model.kv_spec.dtype
        torch.int8
        """
        if dtype not in get_args(KVCacheDtype):
            raise UnknownName("kv_cache_dtype", dtype, get_args(KVCacheDtype))
        block: Any
        for block in self.blocks:
            block.attention.kv_cache_dtype = dtype

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The linear layers that can have LoRA adapters, by PEFT's names."""
        first = (shape for layer, _, shape in self._lora_sites() if layer == 0)
        return tuple(target for shape in first for target in shape.targets)

    def add_lora(self, config: LoraConfig, seed: int) -> None:
        """Freeze the weights and add a LoRA adapter to train; its output is that of the base.

        >>> from ingot.nn import preset
        >>> model = Decoder.from_config(preset("tiny"), seed=0)
        >>> model.add_lora(LoraConfig(rank=4, targets=("q_proj", "v_proj")), seed=0)
        >>> a, b = model.lora_weights()[0, "q_proj"]
        >>> a.shape, bool(b.any())
        (torch.Size([4, 64]), False)
        """
        # Without RoPE it is of the GPT-2 family, whose checkpoints have one weight for q, k and v.
        fused_qkv = self.config.rope is None
        targets = select_targets(config, self.lora_targets, fused_qkv)
        random = torch.Generator().manual_seed(seed)
        self.requires_grad_(False)
        number = 2 * self.config.layers  # the layer of its dropout, after those of `set_dropout`
        for _, module, shape in self._lora_sites():
            own = [target for target in targets if shape.find(target)]
            if own:
                options = {"dtype": self.dtype, "device": self.device}
                module.lora = LoraAdapter(shape, own, config, random, number, **options)
                number += 1

    def add_lora_slots(self, max_loras: int, max_rank: int) -> None:
        """Add slots for LoRA adapters to serve, empty at first: see `BatchLayout.adapters`."""
        if not (1 <= max_loras <= MAX_LORAS and 1 <= max_rank <= MAX_RANK):
            raise ConfigError(
                f"max_loras and max_rank must be from 1 to {MAX_LORAS} and {MAX_RANK}, got "
                f"{max_loras} and {max_rank}",
                hint="give smaller numbers",
            )
        for _, module, shape in self._lora_sites():
            module.lora = LoraSlots(shape, max_loras, max_rank, self.dtype, self.device)

    def set_adapter(self, slot: int, weights: Mapping[LoraKey, LoraWeights], scale: float) -> None:
        """Fill a slot with an adapter: A and B by layer and target. Layers without are cleared.

        >>> from ingot.nn import preset
        >>> model = Decoder.from_config(preset("tiny"), seed=0)
        >>> model.add_lora_slots(max_loras=2, max_rank=8)
        >>> pair = LoraWeights(torch.ones(4, 64), torch.ones(4, 64))
        >>> model.set_adapter(1, {(0, "o_proj"): pair}, scale=2.0)
        """
        rest = dict(weights)
        for layer, module, shape in self._lora_sites():
            names = (*shape.targets, QKV) if shape.find(QKV) else shape.targets
            own = {name: rest.pop((layer, name)) for name in names if (layer, name) in rest}
            if not isinstance(module.lora, LoraSlots):
                raise IngotError("the model has no LoRA slots", hint="call add_lora_slots first")
            module.lora.set(slot, own, scale)
        for layer, target in rest:
            raise UnknownName(f"LoRA target of layer {layer}", target, self.lora_targets)

    def lora_weights(self) -> dict[LoraKey, LoraWeights]:
        """Return A and B of the adapter that is trained, by layer and target; not copies."""
        return {
            (layer, target): pair
            for layer, module, _ in self._lora_sites()
            if isinstance(module.lora, LoraAdapter)
            for target, pair in module.lora.weights().items()
        }

    def _lora_sites(self) -> Iterator[tuple[int, Any, LoraShape]]:
        block: Any
        for layer, block in enumerate(self.blocks):
            # With experts only attention: for PEFT, experts and dense MLPs have the same names.
            sites = block.attention.lora_sites if self.config.moe else block.lora_sites
            yield from ((layer, module, shape) for module, shape in sites)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the activations, and of weights that are not quantized."""
        return self.norm.weight.dtype

    @property
    def has_quantized_head(self) -> bool:
        """Whether the LM head has no `lm_head_weight`."""
        return not isinstance(self._head, LMHead)

    @property
    def lm_head_weight(self) -> Tensor:
        """Weight of the LM head, (V, D); the token embedding if they are tied."""
        if self.has_quantized_head:
            raise IngotError(
                "the LM head is quantized: it has no floating-point weight",
                hint="use `logits` and `logprobs`, or the losses of `ingot.nn.loss`",
            )
        return self._head.weight

    @property
    def _head(self) -> Any:
        return self.tok_embed if self.lm_head is None else self.lm_head

    @property
    def kv_spec(self) -> KVSpec:
        """Shape and dtype of the keys and values cached for a token."""
        spec = KVSpec.of(self.blocks)
        assert spec is not None
        return spec

    def forward(self, tokens_T: Tensor, layout: BatchLayout) -> Tensor:
        """Return the normalized hidden state of each token, (T, D)."""
        x_TD = self.embed(tokens_T, layout)
        for block in self.blocks:
            x_TD = block(x_TD, layout)
        return self.norm(x_TD)

    def embed(self, tokens_T: Tensor, layout: BatchLayout) -> Tensor:
        """Return the input of the first layer, (T, D)."""
        x_TD = self.tok_embed(tokens_T)
        return x_TD if self.pos_embed is None else x_TD + self.pos_embed(layout.positions)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return the logits, (T, V), in float32. Pass only the hidden states you need: V is large.

        Tokens are sampled from these; `ops.token_logprobs` of them is bitwise equal to `logprobs`.
        """
        return self._head.logits(hidden_TD)

    def logprobs(self, hidden_TD: Tensor, tokens_T: Tensor) -> Tensor:
        """Return the log-probability of each next token, (T,), in float32.

        This is the single definition used by trainer and server; bitwise equal to
        `-ops.linear_cross_entropy`.
        """
        return self._head.logprobs(hidden_TD, tokens_T)
