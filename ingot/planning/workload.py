"""What is trained: the shape of a decoder, and the tokens of one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ingot.core.errors import ConfigError, UnknownName

MatmulPrecision = Literal["bf16", "fp8", "mxfp8", "fp4"]
"""Precision of the matmuls inside the layers; the LM head is always computed in bf16."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that decide what a step costs.

    >>> round(SHAPES["llama3-8b"].params / 1e9, 2)
    8.03
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    """Width of a head's values; 0 for `head_dim`."""
    attention_params: int = 0
    """Weights of one attention layer, where its projections have a low rank; 0 to count them."""
    ffn_dim: int
    gated: bool = True
    """Whether the MLP has a gate: three matrices instead of two."""
    vocab_size: int
    tied: bool = False
    """Whether embedding and LM head share their weights."""
    experts: int = 0
    """Experts of a layer; 0 for a dense model."""
    top_k: int = 0
    expert_dim: int = 0
    """Hidden width of an expert."""
    shared_dim: int = 0
    """Hidden width of the shared expert."""
    dense_layers: int = 0
    """Layers of a mixture of experts that have an MLP of `ffn_dim` instead."""
    window: float = 1.0
    """Share of the attention that remains when some layers have a sliding window."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "v_head_dim", self.v_head_dim or self.head_dim)
        sizes = (self.layers, self.dim, self.heads, self.kv_heads, self.head_dim, self.vocab_size)
        if min(sizes) < 1 or (not self.experts and self.ffn_dim < 1):
            raise ConfigError(
                "ModelShape: layers, dim, heads, kv_heads, head_dim, ffn_dim and vocab_size must "
                f"be above 0, got {(*sizes, self.ffn_dim)}",
                hint="check the model's configuration",
            )
        if self.experts and not (0 < self.top_k <= self.experts and self.expert_dim > 0):
            raise ConfigError(
                f"ModelShape: top_k must be from 1 to {self.experts} and expert_dim above 0, got "
                f"{self.top_k} and {self.expert_dim}",
                hint="check the model's configuration",
            )

    @property
    def q_dim(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of all keys and values."""
        return self.kv_heads * (self.head_dim + self.v_head_dim)

    @property
    def o_dim(self) -> int:
        """Width of the attention output."""
        return self.heads * self.v_head_dim

    @property
    def ffn_matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.gated else 2

    @property
    def moe_layers(self) -> int:
        """Layers with experts."""
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_weights(self) -> int:
        """Weights of one attention layer."""
        return self.attention_params or self.dim * (self.q_dim + self.kv_dim + self.o_dim)

    @property
    def dense_weights(self) -> int:
        """Weights of all layers without those of experts."""
        mlp = self.ffn_matrices * self.dim
        dense = (self.layers - self.moe_layers) * mlp * self.ffn_dim
        moe = self.moe_layers * (mlp * self.shared_dim + self.dim * self.experts)
        return self.layers * self.attention_weights + dense + moe

    @property
    def expert_weights(self) -> int:
        """Weights of all experts of all layers."""
        return self.moe_layers * self.experts * self.ffn_matrices * self.dim * self.expert_dim

    @property
    def embedding_weights(self) -> int:
        """Weights of the embedding, and as many of the LM head."""
        return self.vocab_size * self.dim

    @property
    def params(self) -> int:
        """All weights."""
        ends = (1 if self.tied else 2) * self.embedding_weights
        return self.dense_weights + self.expert_weights + ends

    def flops_per_token(self, seq_len: int) -> float:
        """Return the FLOPs of forward and backward for one token, with causal attention.

        This is what MFU counts: 6 per active weight without the embedding, no recomputation.

        >>> round(SHAPES["llama3-8b"].flops_per_token(8192) / 1e9, 1)
        51.5
        """
        active = self.dense_weights + self.embedding_weights
        if self.experts:
            active += self.expert_weights * self.top_k // self.experts
        attention = self.layers * self.window * seq_len * (self.q_dim + self.o_dim)
        return 6.0 * active + 3.0 * attention


@dataclass(frozen=True, kw_only=True)
class TrainingWorkload:
    """A model, and the tokens of one step.

    >>> TrainingWorkload(
    ...     model=SHAPES["llama3-8b"], seq_len=8192, global_batch_size=128
    ... ).tokens_per_step
    1048576
    """

    model: ModelShape
    seq_len: int
    global_batch_size: int
    """Sequences of a step, over all GPUs and micro-batches."""
    precision: MatmulPrecision = "bf16"

    def __post_init__(self) -> None:
        if not (1 <= self.seq_len <= 2**27 and 1 <= self.global_batch_size <= 2**24):
            raise ConfigError(
                "TrainingWorkload: sequence length and global batch size must be above 0, got "
                f"{self.seq_len} and {self.global_batch_size}",
                hint="give positive numbers",
            )
        if self.precision not in get_args(MatmulPrecision):
            raise UnknownName("precision", self.precision, get_args(MatmulPrecision))

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step."""
        return self.seq_len * self.global_batch_size

    @property
    def flops_per_step(self) -> float:
        """FLOPs of a step, as MFU counts them."""
        return self.tokens_per_step * self.model.flops_per_token(self.seq_len)


def _llama(layers: int, dim: int, heads: int, ffn_dim: int, vocab_size: int = 128256) -> ModelShape:
    return ModelShape(
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=8,
        head_dim=dim // heads,
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
    )


SHAPES: dict[str, ModelShape] = {
    "llama3-8b": _llama(32, 4096, 32, 14336),
    "llama3-70b": _llama(80, 8192, 64, 28672),
    "llama3-405b": _llama(126, 16384, 128, 53248),
    "gpt3-175b": ModelShape(
        layers=96,
        dim=12288,
        heads=96,
        kv_heads=96,
        head_dim=128,
        ffn_dim=49152,
        gated=False,
        vocab_size=51200,
        tied=True,
    ),
    "mixtral-8x7b": ModelShape(
        layers=32,
        dim=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn_dim=0,
        vocab_size=32000,
        experts=8,
        top_k=2,
        expert_dim=14336,
    ),
    "qwen3-30b-a3b": ModelShape(
        layers=48,
        dim=2048,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn_dim=0,
        vocab_size=151936,
        experts=128,
        top_k=8,
        expert_dim=768,
    ),
    "deepseek-v3": ModelShape(
        layers=61,
        dim=7168,
        heads=128,
        kv_heads=128,
        head_dim=192,
        v_head_dim=128,
        attention_params=187105280,
        ffn_dim=18432,
        vocab_size=129280,
        experts=256,
        top_k=8,
        expert_dim=2048,
        shared_dim=2048,
        dense_layers=3,
    ),
}
"""Models that `ingot plan` knows by name."""


def shape_from_config(raw: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model from its Hugging Face config.json.

    >>> shape_from_config({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    ...                    "intermediate_size": 160, "vocab_size": 256}).kv_heads
    4
    """
    try:
        return _read_shape(raw)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"config.json: no decoder's sizes: {type(error).__name__} {error}"[:200],
            hint="it needs hidden_size, num_hidden_layers, num_attention_heads, vocab_size",
        ) from error


def _read_shape(raw: Mapping[str, Any]) -> ModelShape:
    if "n_embd" in raw:  # GPT-2
        dim, heads = int(raw["n_embd"]), int(raw["n_head"])
        return ModelShape(
            layers=int(raw["n_layer"]),
            dim=dim,
            heads=heads,
            kv_heads=heads,
            head_dim=dim // heads,
            ffn_dim=int(raw.get("n_inner") or 4 * dim),
            gated=False,
            vocab_size=int(raw["vocab_size"]),
            tied=True,
        )
    dim, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
    head_dim = int(raw.get("head_dim") or dim // heads)
    experts = next((int(raw[key]) for key in _EXPERT_KEYS if raw.get(key)), 0)
    ffn_dim = int(raw.get("intermediate_size") or 0)
    expert_dim = int(raw.get("moe_intermediate_size") or ffn_dim)
    fields: dict[str, Any] = {
        "layers": int(raw["num_hidden_layers"]),
        "dim": dim,
        "heads": heads,
        "kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": head_dim,
        "ffn_dim": ffn_dim,
        "gated": raw.get("model_type") not in ("gpt_neox", "opt", "falcon", "nemotron"),
        "vocab_size": int(raw["vocab_size"]),
        "tied": bool(raw.get("tie_word_embeddings", False)),
    }
    if experts:
        fields |= {
            "experts": experts,
            "top_k": int(raw.get("num_experts_per_tok") or 2),
            "expert_dim": expert_dim,
            "shared_dim": expert_dim * int(raw.get("n_shared_experts") or 0),
            "dense_layers": int(raw.get("first_k_dense_replace") or 0),
        }
    if raw.get("kv_lora_rank"):
        fields |= _latent_attention(raw, dim, heads)
    return ModelShape(**fields)


_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")


def _latent_attention(raw: Mapping[str, Any], dim: int, heads: int) -> dict[str, int]:
    """Return the head sizes and the weights of multi-head latent attention."""
    nope, rope = int(raw["qk_nope_head_dim"]), int(raw["qk_rope_head_dim"])
    value, rank = int(raw["v_head_dim"]), int(raw["kv_lora_rank"])
    q_rank = int(raw.get("q_lora_rank") or 0)
    q_dim = heads * (nope + rope)
    query = q_rank * (dim + q_dim) if q_rank else dim * q_dim
    keys = dim * (rank + rope) + rank * heads * (nope + value)
    weights = query + keys + heads * value * dim
    return {"head_dim": nope + rope, "v_head_dim": value, "attention_params": weights}


def shape_from_decoder(table: Mapping[str, Any]) -> ModelShape:
    """Return the shape of a model from the fields of a `DecoderConfig`, as in a recipe's [model].

    >>> shape_from_decoder({"vocab_size": 256, "dim": 64, "layers": 2, "heads": 4, "kv_heads": 2,
    ...                     "head_dim": 16, "ffn_dim": 160}).params
    118784
    """
    names = ("vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim")
    try:
        sizes = {name: int(table[name]) for name in names}
        activation = table.get("activation") or "swiglu"
        fields: dict[str, Any] = {
            "gated": getattr(activation, "value", activation) == "swiglu",
            "tied": bool(table.get("tie_embeddings", False)),
        }
        if moe := table.get("moe"):
            fields |= {
                "experts": int(moe["num_experts"]),
                "top_k": int(moe["top_k"]),
                "expert_dim": int(moe["ffn_dim"]),
                "dense_layers": sizes["layers"] - len(moe["layers"]) if moe.get("layers") else 0,
            }
        return ModelShape(**sizes, **fields)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model: no decoder's sizes: {type(error).__name__} {error}"[:200],
            hint=f"it needs {', '.join(names)}",
        ) from error
