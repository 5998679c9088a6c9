"""What a decoder is, as data: the families differ in these fields and in nothing else.

    GPT-2            learned positions, LayerNorm, a plain MLP, biases everywhere
    Llama, SmolLM2   rotary positions, RMSNorm, SwiGLU; grouped key-value heads; tied or not
    Mistral          and a sliding window
    Qwen2, Qwen3     and a bias of q, k, v; or a norm of each head of q and k
    OLMo2            norms behind the branches instead of before them, and of the whole q and k
    Mixtral, Qwen3-MoE   experts instead of one MLP, in all layers or in some

Every number has bounds, checked here, before anything is allocated: a config often comes from a
file that somebody else wrote.
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
    """How a row is normalized: `ops.rms_norm`, or `ops.layer_norm` with a bias."""

    RMS = "rms"
    LAYER = "layer"


class NormPosition(Enum):
    """Where a block normalizes: what its branches read, or what they add."""

    PRE = "pre"
    POST = "post"


class QkNorm(Enum):
    """What an RMSNorm of queries and keys spans: each head, or all of them together."""

    PER_HEAD = "per_head"
    FULL = "full"


class Activation(Enum):
    """The nonlinearity of the MLP. SwiGLU has a gate beside it, the others do not."""

    SWIGLU = "swiglu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"


# The most of each: several times what any published model has.
_MOST = {
    "vocab_size": 2**22,
    "dim": 2**17,
    "layers": 2**10,
    "heads": 2**11,
    "kv_heads": 2**11,
    "head_dim": 2**12,
    "ffn_dim": 2**20,
    "max_seq_len": 2**27,
    "sliding_window": 2**27,
    "num_experts": 2**12,
    "top_k": 2**8,
}


def _bounded(of: object, *names: str) -> None:
    for name in names:
        value, most = getattr(of, name), _MOST[name]
        if not (type(value) is int and 1 <= value <= most):
            raise ConfigError(
                f"{name} is {value!r}"[:200], hint=f"give a whole number from 1 to {most}"
            )


def _positive(name: str, value: object, most: float) -> None:
    if not (isinstance(value, int | float) and 0 < value <= most and math.isfinite(value)):
        raise ConfigError(f"{name} is {value!r}"[:200], hint=f"give a number above 0, to {most}")


def _flags(of: object, *names: str) -> None:
    for name in names:
        if type(getattr(of, name)) is not bool:
            raise ConfigError(f"{name} is {getattr(of, name)!r}"[:200], hint="give true or false")


def _some_layers(name: str, chosen: tuple[int, ...] | None, layers: int) -> None:
    if chosen is None:
        return
    known = range(layers)
    if not (chosen and all(layer in known for layer in chosen) and _rises(chosen)):
        raise ConfigError(
            f"{name} is {chosen!r}"[:200],
            hint=f"name layers from 0 to {layers - 1} in order, or leave it out for all of them",
        )


def _rises(numbers: tuple[int, ...]) -> bool:
    return all(a < b for a, b in pairwise(numbers))


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions: the base of their frequencies, and how these are stretched.

    >>> Rope(theta=500000.0).scaling is None
    True
    """

    theta: float = 10000.0
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        _positive("theta", self.theta, 1e15)
        if self.scaling is None:
            return
        for name, value in vars(self.scaling).items():
            _positive(name, value, 1e9)
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
                raise ConfigError(f"theta is {self.theta}", hint="give one above 1")
            case _:
                pass


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A mixture of experts in the place of the MLP: each token goes to the best `top_k`.

    >>> MoEConfig(num_experts=8, top_k=2, ffn_dim=14336).norm_topk_prob
    True
    """

    num_experts: int
    top_k: int
    ffn_dim: int
    """Width of an expert."""
    norm_topk_prob: bool = True
    """Whether the weights of the chosen experts sum to 1."""
    layers: tuple[int, ...] | None = None
    """Which layers have experts; all of them if None."""

    def __post_init__(self) -> None:
        _bounded(self, "num_experts", "top_k", "ffn_dim")
        _flags(self, "norm_topk_prob")
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"top_k is {self.top_k} of {self.num_experts} experts",
                hint="choose no more than exist",
            )


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Everything a `Decoder` is made of. Presets are in `ingot.nn.presets`.

    >>> config = DecoderConfig(
    ...     vocab_size=256, dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_dim=128,
    ...     max_seq_len=512, rope=Rope()
    ... )
    >>> config.window_per_layer
    (None, None)
    """

    vocab_size: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_dim: int
    """Width of the MLP."""
    max_seq_len: int
    """The longest sequence it is made for."""
    rope: Rope | None = None
    """Rotary positions; learned ones, added to the embedding, if None."""
    norm: NormKind = NormKind.RMS
    norm_position: NormPosition = NormPosition.PRE
    norm_eps: float = 1e-5
    qk_norm: QkNorm | None = None
    activation: Activation = Activation.SWIGLU
    qkv_bias: bool = False
    o_bias: bool = False
    """Of what attention puts out."""
    mlp_bias: bool = False
    tie_embeddings: bool = False
    """Whether the head is the embedding."""
    sliding_window: int | None = None
    """How far a token sees in the layers of `sliding_window_layers`."""
    sliding_window_layers: tuple[int, ...] | None = None
    """Which layers have the window; all of them if None."""
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        _bounded(self, "vocab_size", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim")
        _bounded(self, "max_seq_len", *(() if self.sliding_window is None else ("sliding_window",)))
        _positive("norm_eps", self.norm_eps, 1.0)
        _flags(self, "qkv_bias", "o_bias", "mlp_bias", "tie_embeddings")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} heads cannot share {self.kv_heads} key-value heads evenly",
                hint="give heads that are a multiple of kv_heads",
            )
        if self.rope and (self.head_dim < 4 or self.head_dim % 2):
            raise ConfigError(
                f"head_dim is {self.head_dim}, which rotary positions cannot pair",
                hint="give an even number, 4 or more",
            )
        if self.mlp_bias and self.activation is Activation.SWIGLU:
            raise ConfigError("mlp_bias with SwiGLU", hint="choose one of the two")
        if self.sliding_window is None and self.sliding_window_layers is not None:
            raise ConfigError(
                "sliding_window_layers without a sliding_window", hint="give sliding_window too"
            )
        _some_layers("sliding_window_layers", self.sliding_window_layers, self.layers)
        if self.moe:
            _some_layers("moe.layers", self.moe.layers, self.layers)

    @property
    def window_per_layer(self) -> tuple[int | None, ...]:
        """How far a token sees, in each layer."""
        chosen = (
            range(self.layers) if self.sliding_window_layers is None else self.sliding_window_layers
        )
        return tuple(
            self.sliding_window if layer in chosen else None for layer in range(self.layers)
        )

    @property
    def is_moe_layer(self) -> tuple[bool, ...]:
        """Which layers have experts."""
        if self.moe is None:
            return (False,) * self.layers
        chosen = range(self.layers) if self.moe.layers is None else self.moe.layers
        return tuple(layer in chosen for layer in range(self.layers))
