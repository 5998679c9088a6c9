"""The mapping between config.json and `DecoderConfig` or `EncoderConfig`, in both directions.

A `KeyMapping` covers a group of keys: `read` turns them into fields of `DecoderConfig`, `write`
turns the fields back into keys. A `Family` (`model_type`) is a record that lists its mappings, the
defaults of transformers, the supported values of other keys, and the names of its tensors; the
records are in `ingot.interop.hf_families`.

A key that changes the numbers is never ignored: an unsupported value is an error that names the
key. Unknown keys are kept and written back.
"""

# pyright: basic
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ingot.core.errors import ConfigError, UnknownName
from ingot.nn.config import (
    Activation,
    DecoderConfig,
    EncoderConfig,
    LinearScaling,
    Llama3Scaling,
    MoEConfig,
    Rope,
    YarnScaling,
)

RawConfig: TypeAlias = dict[str, Any]
"""Content of a config.json."""
MAX_LAYERS = 2**16
"""Bound of loops over layers whose number has not been checked yet."""

SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleaved": (None, False),
    "clip_qkv": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "residual_multiplier": (None, 1.0),
    "attention_multiplier": (None,),
    "no_rope_layers": (None,),
    "attention_chunk_size": (None,),
    "is_encoder_decoder": (None, False),
}
"""Keys that change the numbers in some family, and their neutral values."""


@dataclass(frozen=True)
class KeyMapping:
    """A group of keys of config.json and the fields of `DecoderConfig` they set."""

    read: Callable[[RawConfig], dict[str, Any]]
    write: Callable[[Any], RawConfig]


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything specific to a `model_type`."""

    model_type: str
    architecture: str
    prefix: str
    """Prefix of all tensor names but that of the LM head; base models omit it."""
    mappings: tuple[KeyMapping, ...]
    tensor_names: Mapping[str, str | tuple[str, ...]]
    """Hugging Face's name of each parameter; several names share its rows."""
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields with the same value in the whole family."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values that transformers assumes for missing keys."""
    supported_values: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Supported values of keys that change the numbers, in addition to `SUPPORTED_VALUES`."""
    transposed: frozenset[str] = frozenset()
    """Parameters that are stored transposed."""
    ignored_tensors: str = r".*\.rotary_emb\.inv_freq"
    """Pattern of tensors that are constants rather than weights; old files contain some."""
    config_type: type[DecoderConfig] | type[EncoderConfig] = DecoderConfig

    def read(self, raw: RawConfig) -> Any:
        """Return the configuration of a config.json, of type `config_type`."""
        raw = {**self.defaults, **raw}
        for key, supported in {**SUPPORTED_VALUES, **self.supported_values}.items():
            if key in raw and raw[key] not in supported:
                raise ConfigError(
                    f"config.json: {key} is {raw[key]!r}, which is not supported"[:300],
                    hint=f"use a model with {key} = {' or '.join(map(repr, supported))}",
                )
        fields = dict(self.constants)
        for mapping in self.mappings:
            fields |= mapping.read(raw)
        return self.config_type(**fields)

    def write(self, config: DecoderConfig | EncoderConfig, source: RawConfig) -> RawConfig:
        """Return a config.json for the configuration, with the other keys of `source`.

        Fields that the family cannot express are lost: compare with `read`.
        """
        raw = {key: source[key] for key in source if key not in ("rope_scaling", "rope_theta")}
        raw |= {"model_type": self.model_type, "architectures": [self.architecture]}
        for mapping in self.mappings:
            raw |= mapping.write(config)
        return raw | {key: values[0] for key, values in self.supported_values.items()}


def keys(**fields: str) -> KeyMapping:
    """Map each field to the key of the same value: `keys(dim="hidden_size")`.

    >>> keys(dim="hidden_size").read({"hidden_size": 64})
    {'dim': 64}
    """

    def read(raw: RawConfig) -> dict[str, Any]:
        _require(raw, *fields.values())
        return {field: raw[key] for field, key in fields.items()}

    return KeyMapping(read, lambda config: {key: getattr(config, f) for f, key in fields.items()})


def _require(raw: RawConfig, *names: str) -> None:
    for name in names:
        if name not in raw:
            raise ConfigError(f"config.json has no {name}", hint="add the key")


def _read_heads(raw: RawConfig) -> dict[str, Any]:
    """Read `num_key_value_heads` and `head_dim`, which default to values of other keys."""
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads")
    head_dim = raw.get("head_dim")
    if head_dim is None:
        head_dim = _head_dim(raw["hidden_size"], heads)
    return {"kv_heads": heads if kv_heads is None else kv_heads, "head_dim": head_dim}


def _head_dim(dim: Any, heads: Any) -> int:
    if not (type(dim) is int and type(heads) is int and heads > 0 and dim % heads == 0):
        raise ConfigError(
            f"config.json: the number of heads must divide the hidden size, got {heads!r} heads "
            f"and {dim!r}"[:200],
            hint="correct one of the two, or add head_dim",
        )
    return dim // heads


HEADS = KeyMapping(
    _read_heads, lambda c: {"num_key_value_heads": c.kv_heads, "head_dim": c.head_dim}
)

_ROPE_SCALINGS: dict[str, type | None] = {
    "default": None,
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}
_ROPE_SUPPORTED_VALUES = {"partial_rotary_factor": (None, 1.0), "truncate": (None, True)}


def _read_rope(raw: RawConfig) -> dict[str, Any]:
    """Read RoPE from `rope_parameters`, or (transformers 4) `rope_scaling` and `rope_theta`."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ConfigError(
            f"config.json: rope_parameters must be an object, got {given!r}"[:200],
            hint="give an object with rope_type and its parameters",
        )
    given = {"rope_theta": raw["rope_theta"], **given}
    rope_type = given.pop("rope_type", given.pop("type", "default"))
    theta = _number("rope_theta", given.pop("rope_theta"))
    if not (isinstance(rope_type, str) and rope_type in _ROPE_SCALINGS):
        raise UnknownName("rope_type in config.json:", str(rope_type)[:100], _ROPE_SCALINGS)
    given.pop("type", None)
    scaling = _ROPE_SCALINGS[rope_type]
    _check_rope_keys(rope_type, given)
    if scaling is None:
        return {"rope": Rope(theta=theta)}
    values = {k: _number(k, given[k]) for k in _scaling_keys(scaling) if given.get(k) is not None}
    if (original := "original_max_position_embeddings") in values:
        values[original] = int(values[original])
    required = {f.name for f in dataclasses.fields(scaling) if f.default is dataclasses.MISSING}
    if missing := sorted(required - values.keys()):
        raise ConfigError(
            f"config.json: rope_parameters has no {missing[0]}",
            hint=f"give {', '.join(sorted(required))} for rope_type {rope_type}",
        )
    return {"rope": Rope(theta=theta, scaling=scaling(**values))}


def _check_rope_keys(rope_type: str, given: RawConfig) -> None:
    known = _scaling_keys(_ROPE_SCALINGS[rope_type])
    for key, value in given.items():
        if key in known or key == "original_max_position_embeddings":
            continue
        if value not in _ROPE_SUPPORTED_VALUES.get(key, (None,)):
            raise ConfigError(
                f"config.json: {key} of rope_parameters is {value!r}, which is not supported"[:300],
                hint=f"give rope_type {rope_type} only {', '.join(known) or 'rope_theta'}",
            )


def _scaling_keys(scaling: type | None) -> list[str]:
    """Return the keys of a RoPE scaling: the fields of its class."""
    return [field.name for field in dataclasses.fields(scaling)] if scaling else []


def _number(key: str, value: Any) -> float:
    if type(value) not in (int, float) or abs(value) > 1e18:
        raise ConfigError(
            f"config.json: {key} must be a number, got {value!r}"[:200], hint="give a number"
        )
    return float(value)


def _write_rope(config: DecoderConfig) -> RawConfig:
    if config.rope is None:
        return {}
    parameters: RawConfig = {"rope_theta": config.rope.theta, "rope_type": "default"}
    if config.rope.scaling is not None:
        for rope_type, scaling in _ROPE_SCALINGS.items():
            if scaling and isinstance(config.rope.scaling, scaling):
                parameters |= {"rope_type": rope_type, **dataclasses.asdict(config.rope.scaling)}
    return {"rope_parameters": parameters}


ROPE = KeyMapping(_read_rope, _write_rope)

SLIDING_WINDOW = keys(sliding_window="sliding_window")
"""Mistral: in all layers."""

SWITCHED_WINDOW = KeyMapping(
    lambda raw: {"sliding_window": raw["sliding_window"] if raw["use_sliding_window"] else None},
    lambda c: {
        "use_sliding_window": c.sliding_window is not None,
        "sliding_window": c.sliding_window,
    },
)
"""Qwen3-MoE: in all layers, if it is switched on."""

_LAYER_TYPES = ("full_attention", "sliding_attention")


def _read_layered_window(raw: RawConfig) -> dict[str, Any]:
    window = raw["sliding_window"] if raw["use_sliding_window"] else None
    layers = _windowed_layers(raw)
    if window is None or not layers:
        return {}
    in_all = len(layers) == raw["num_hidden_layers"]
    return {"sliding_window": window, "sliding_window_layers": None if in_all else tuple(layers)}


def _windowed_layers(raw: RawConfig) -> list[int]:
    count, types = raw["num_hidden_layers"], raw["layer_types"]
    if types is None:
        first = raw["max_window_layers"]
        if type(first) is not int or type(count) is not int:
            raise ConfigError(
                f"config.json: max_window_layers must be a number of layers, got {first!r}"[:200],
                hint="give a whole number",
            )
        return list(range(max(first, 0), min(count, MAX_LAYERS)))
    if not (isinstance(types, list) and all(kind in _LAYER_TYPES for kind in types)):
        raise ConfigError(
            f"config.json: layer_types is {types!r}, which is not supported"[:300],
            hint=f"give a list of {' and '.join(_LAYER_TYPES)}",
        )
    if len(types) != count:
        raise ConfigError(
            f"config.json: layer_types must have {count!r} entries, got {len(types)}"[:200],
            hint="give one for each layer",
        )
    return [layer for layer, kind in enumerate(types) if kind == _LAYER_TYPES[1]]


def _write_layered_window(config: DecoderConfig) -> RawConfig:
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": [_LAYER_TYPES[window is not None] for window in config.window_per_layer],
    }


LAYERED_WINDOW = KeyMapping(_read_layered_window, _write_layered_window)
"""Qwen2, Qwen3: in the layers that `layer_types` lists, or else from `max_window_layers` on."""


def _read_moe(raw: RawConfig) -> dict[str, Any]:
    _require(raw, "num_local_experts", "num_experts_per_tok", "intermediate_size")
    moe = MoEConfig(
        num_experts=raw["num_local_experts"],
        top_k=raw["num_experts_per_tok"],
        ffn_dim=raw["intermediate_size"],
    )
    return {"moe": moe}


def _write_moe(config: DecoderConfig) -> RawConfig:
    moe = config.moe
    if moe is None:
        return {}
    return {"num_local_experts": moe.num_experts, "num_experts_per_tok": moe.top_k}


MOE = KeyMapping(_read_moe, _write_moe)
"""Mixtral: in all layers, each expert as wide as the dense MLP would be."""


def _read_interleaved_moe(raw: RawConfig) -> dict[str, Any]:
    _require(raw, "num_experts_per_tok", "moe_intermediate_size")
    step, dense = raw["decoder_sparse_step"], raw["mlp_only_layers"] or []
    count = raw["num_hidden_layers"]
    if not (type(step) is int and step > 0 and isinstance(dense, list) and type(count) is int):
        raise ConfigError(
            f"config.json: decoder_sparse_step must be a positive number and mlp_only_layers a "
            f"list, got {step!r} and {dense!r}"[:300],
            hint="correct these keys",
        )
    layers = [i for i in range(min(count, MAX_LAYERS)) if i not in dense and (i + 1) % step == 0]
    if not layers:
        return {"moe": None}
    moe = MoEConfig(
        num_experts=raw.get("num_local_experts", raw.get("num_experts")),  # pyright: ignore[reportArgumentType]  # checked by MoEConfig
        top_k=raw["num_experts_per_tok"],
        ffn_dim=raw["moe_intermediate_size"],
        norm_topk_prob=raw["norm_topk_prob"],
        layers=None if len(layers) == count else tuple(layers),
    )
    return {"moe": moe}


def _write_interleaved_moe(config: DecoderConfig) -> RawConfig:
    moe = config.moe
    if moe is None:
        return {}
    return {
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.ffn_dim,
        "norm_topk_prob": moe.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, is_moe in enumerate(config.is_moe_layer) if not is_moe],
    }


INTERLEAVED_MOE = KeyMapping(_read_interleaved_moe, _write_interleaved_moe)
"""Qwen3-MoE: in every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""

_ACTIVATIONS = {
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu": Activation.GELU,
    "relu": Activation.RELU,
}


def _read_activation(raw: RawConfig, key: str) -> Activation:
    name = raw[key]
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnknownName(f"{key} in config.json:", str(name)[:100], _ACTIVATIONS)
    return _ACTIVATIONS[name]


def _activation_name(config: DecoderConfig | EncoderConfig) -> str:
    names = [name for name, kind in _ACTIVATIONS.items() if kind is config.activation]
    return (names or [""])[0]


def _read_gpt2(raw: RawConfig) -> dict[str, Any]:
    dim = raw.get("n_embd")
    return {
        "kv_heads": raw.get("n_head"),
        "head_dim": _head_dim(dim, raw.get("n_head")),
        "ffn_dim": 4 * dim if raw["n_inner"] is None else raw["n_inner"],  # pyright: ignore
        "activation": _read_activation(raw, "activation_function"),
    }


def _write_gpt2(config: DecoderConfig) -> RawConfig:
    return {"n_inner": config.ffn_dim, "activation_function": _activation_name(config)}


GPT2_MLP = KeyMapping(_read_gpt2, _write_gpt2)
"""GPT-2: sizes that default to values of other keys, and the activation."""

HIDDEN_ACT = KeyMapping(
    lambda raw: {"activation": _read_activation(raw, "hidden_act")},
    lambda config: {"hidden_act": _activation_name(config)},
)
"""BERT: the activation of an MLP without a gate."""
