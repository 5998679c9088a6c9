"""The configurations of decoders and encoders. Model families differ in these fields only.

    GPT-2                learned position embeddings, LayerNorm, MLP without a gate, biases
    Llama, SmolLM2       RoPE, RMSNorm, SwiGLU, grouped-query attention; tied embeddings or not
    Mistral              + sliding-window attention
    Qwen2, Qwen3         + bias of q, k, v; or RMSNorm of each head of q and k
    OLMo2                post-norm, and RMSNorm over all heads of q and k
    Mixtral, Qwen3-MoE   mixture of experts, in all layers or in some
    BERT, MiniLM         encoders: attention to all tokens, token types, LayerNorm after the sum

Every number is checked against bounds before anything is allocated: a configuration often comes
from an untrusted file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from ingot.core.errors import ConfigError
from ingot.ops.rope import LinearScaling, Llama3Scaling, YarnScaling

Scaling = LinearScaling | Llama3Scaling | YarnScaling


class NormKind(Enum):
    """Type of the norms: `ops.rms_norm`, or `ops.layer_norm` with a bias."""

    RMS = "rms"
    LAYER = "layer"


class NormPosition(Enum):
    """Whether a block normalizes the input (pre-norm) or the output (post-norm) of a sublayer."""

    PRE = "pre"
    POST = "post"


class QkNorm(Enum):
    """Extent of the RMSNorm of queries and keys: each head, or all heads together."""

    PER_HEAD = "per_head"
    FULL = "full"


class Activation(Enum):
    """Activation of the MLP. SwiGLU has a gate, the others have none."""

    SWIGLU = "swiglu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


# Upper bounds: several times the largest published models.
_MAX = {
    "vocab_size": 2**22,
    "dim": 2**17,
    "layers": 2**10,
    "heads": 2**11,
    "kv_heads": 2**11,
    "head_dim": 2**12,
    "ffn_dim": 2**20,
    "type_vocab_size": 2**10,
    "max_seq_len": 2**27,
    "sliding_window": 2**27,
    "num_experts": 2**12,
    "top_k": 2**8,
}


def _check_sizes(config: object, *names: str) -> None:
    for name in names:
        value, high = getattr(config, name), _MAX[name]
        if not (type(value) is int and 1 <= value <= high):
            raise ConfigError(
                f"{name} is {value!r}"[:200], hint=f"give a whole number from 1 to {high}"
            )


def _check_positive(name: str, value: object, high: float) -> None:
    if not (isinstance(value, int | float) and 0 < value <= high and math.isfinite(value)):
        raise ConfigError(
            f"{name} is {value!r}"[:200], hint=f"give a number above 0 and at most {high}"
        )


def _check_flags(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if type(value) is not bool:
            raise ConfigError(f"{name} is {value!r}"[:200], hint="give true or false")


def _check_layers(name: str, indices: tuple[int, ...] | None, layers: int) -> None:
    if indices is None:
        return
    known = range(layers)
    if not (indices and all(layer in known for layer in indices) and _is_ascending(indices)):
        raise ConfigError(
            f"{name} is {indices!r}"[:200],
            hint=f"list layers from 0 to {layers - 1} in order, or omit it for all layers",
        )


def _is_ascending(numbers: tuple[int, ...]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embeddings (RoPE): base frequency and context extension.

    >>> Rope(theta=500000.0).scaling is None
    True
    """

    theta: float = 10000.0
    """Base of the frequencies."""
    scaling: Scaling | None = None
    """Context extension by scaled frequencies; None for none."""

    def __post_init__(self) -> None:
        _check_positive("theta", self.theta, 1e15)
        if self.scaling is None:
            return
        for name, value in vars(self.scaling).items():
            _check_positive(name, value, 1e9)
        match self.scaling:
            case Llama3Scaling(low_freq_factor=low, high_freq_factor=high) if not low < high:
                raise ConfigError(
                    f"low_freq_factor {low} is not below high_freq_factor {high}",
                    hint="give a low_freq_factor below high_freq_factor",
                )
            case YarnScaling(beta_slow=slow, beta_fast=fast) if not slow < fast:
                raise ConfigError(
                    f"beta_slow {slow} is not below beta_fast {fast}",
                    hint="give a beta_slow below beta_fast",
                )
            case YarnScaling() if self.theta <= 1:
                raise ConfigError(
                    f"theta must be above 1, got {self.theta}", hint="give a larger theta"
                )
            case _:
                pass


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts instead of the MLP: the router sends each token to `top_k` of them.

    >>> MoEConfig(num_experts=8, top_k=2, ffn_dim=14336).norm_topk_prob
    True
    """

    num_experts: int
    """Number of experts in a layer."""
    top_k: int
    """Number of experts that process a token."""
    ffn_dim: int
    """Hidden width of an expert."""
    norm_topk_prob: bool = True
    """Whether the weights of the selected experts are normalized to sum to 1."""
    layers: tuple[int, ...] | None = None
    """Layers with experts; None for all."""

    def __post_init__(self) -> None:
        _check_sizes(self, "num_experts", "top_k", "ffn_dim")
        _check_flags(self, "norm_topk_prob")
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"top_k must be at most num_experts, got {self.top_k} and {self.num_experts}",
                hint="give a smaller top_k",
            )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Architecture of a `Decoder`. Presets are in `ingot.nn.presets`.

    >>> config = DecoderConfig(
    ...     vocab_size=256, dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_dim=128,
    ...     max_seq_len=512, rope=Rope()
    ... )
    >>> config.window_per_layer
    (None, None)
    """

    vocab_size: int
    """Number of token ids."""
    dim: int
    """Width of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of key-value heads; must divide `heads`."""
    head_dim: int
    """Width of a head."""
    ffn_dim: int
    """Hidden width of the MLP."""
    max_seq_len: int
    """Maximum sequence length."""
    rope: Rope | None = None
    """RoPE; None for learned position embeddings."""
    norm: NormKind = NormKind.RMS
    """Type of the norms: RMSNorm or LayerNorm."""
    norm_position: NormPosition = NormPosition.PRE
    """Whether norms are applied to the input or the output of a sublayer."""
    norm_eps: float = 1e-5
    """Epsilon of the norms."""
    qk_norm: QkNorm | None = None
    """RMSNorm of queries and keys, of each head or of all together; None for none."""
    activation: Activation = Activation.SWIGLU
    """Activation of the MLP."""
    qkv_bias: bool = False
    """Bias of the query, key and value projections."""
    o_bias: bool = False
    """Bias of the attention output projection."""
    mlp_bias: bool = False
    """Bias of the MLP layers; not supported with SwiGLU."""
    tie_embeddings: bool = False
    """Whether the LM head shares the weight of the token embedding."""
    sliding_window: int | None = None
    """Number of tokens that a token attends to in the layers of `sliding_window_layers`."""
    sliding_window_layers: tuple[int, ...] | None = None
    """Layers with a sliding window; None for all."""
    moe: MoEConfig | None = None
    """Mixture of experts; None for an MLP in every layer."""

    def __post_init__(self) -> None:
        _check_sizes(self, "vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim")
        _check_sizes(self, "ffn_dim", "max_seq_len")
        if self.sliding_window is not None:
            _check_sizes(self, "sliding_window")
        _check_positive("norm_eps", self.norm_eps, 1.0)
        _check_flags(self, "qkv_bias", "o_bias", "mlp_bias", "tie_embeddings")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}",
                hint="give heads that are a multiple of kv_heads",
            )
        if self.rope and (self.head_dim < 4 or self.head_dim % 2):
            raise ConfigError(
                f"head_dim must be even and at least 4 for RoPE, got {self.head_dim}",
                hint="give an even head_dim, or no rope",
            )
        if self.mlp_bias and self.activation is Activation.SWIGLU:
            raise ConfigError("mlp_bias is not supported with SwiGLU", hint="set mlp_bias = false")
        if self.sliding_window is None and self.sliding_window_layers is not None:
            raise ConfigError(
                "sliding_window_layers without a sliding_window", hint="give sliding_window too"
            )
        _check_layers("sliding_window_layers", self.sliding_window_layers, self.layers)
        if self.moe:
            _check_layers("moe.layers", self.moe.layers, self.layers)

    @property
    def window_per_layer(self) -> tuple[int | None, ...]:
        """Sliding window of each layer; None for full attention."""
        layers, chosen = range(self.layers), self.sliding_window_layers
        return tuple(
            self.sliding_window if chosen is None or layer in chosen else None for layer in layers
        )

    @property
    def is_moe_layer(self) -> tuple[bool, ...]:
        """Whether each layer has a mixture of experts."""
        if self.moe is None:
            return (False,) * self.layers
        chosen = range(self.layers) if self.moe.layers is None else self.moe.layers
        return tuple(layer in chosen for layer in range(self.layers))


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Architecture of an `Encoder`.

    >>> sizes = {"vocab_size": 256, "dim": 64, "layers": 2, "heads": 4, "ffn_dim": 128}
    >>> EncoderConfig(**sizes, max_seq_len=512).head_dim
    16
    """

    vocab_size: int
    """Number of token ids."""
    dim: int
    """Width of the residual stream."""
    layers: int
    """Number of blocks."""
    heads: int
    """Number of attention heads; must divide `dim`."""
    ffn_dim: int
    """Hidden width of the MLP."""
    max_seq_len: int
    """Maximum sequence length."""
    type_vocab_size: int = 2
    """Number of token types."""
    norm_eps: float = 1e-12
    """Epsilon of the norms."""
    activation: Activation = Activation.GELU
    """Activation of the MLP; SwiGLU is not supported."""

    def __post_init__(self) -> None:
        _check_sizes(self, "vocab_size", "dim", "layers", "heads", "ffn_dim", "max_seq_len")
        _check_sizes(self, "type_vocab_size")
        _check_positive("norm_eps", self.norm_eps, 1.0)
        if self.dim % self.heads:
            raise ConfigError(
                f"heads must divide dim, got {self.heads} and {self.dim}",
                hint="give a number of heads that divides dim",
            )
        if self.activation is Activation.SWIGLU:
            raise ConfigError("encoders have no SwiGLU", hint="set activation to gelu")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.heads

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads: as many as query heads."""
        return self.heads
