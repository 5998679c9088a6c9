"""Hugging Face directories: config.json and *.safetensors, read and written as they are.

    decoder = load("SmolLM2-135M-Instruct")
    save(decoder, "copy")                       # the same tensors, byte for byte

A family (`model_type`) is a table: which key of config.json is which field of `DecoderConfig`,
what transformers takes for a key that is left out, which values of the other keys are supported,
and what its tensors are called. The names stand for views of the decoder's parameters: q, k and v
for rows of the one weight that holds them, an expert's weight for its part of all experts', and
GPT-2's transposed weights for transposed views. Loading fills the views, saving writes them.

What a key says is never ignored if it changes the numbers: a value that is not supported is an
error that names the key. Keys that we do not know are kept and written again. No code from a
directory is run, and no pickle is opened.
"""

# pyright: basic
from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ingot.core.errors import ConfigError, IngotError, UnknownName
from ingot.core.paths import write_atomic
from ingot.interop.directory import dtypes, parameters
from ingot.nn.config import (
    Activation,
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    MoEConfig,
    NormKind,
    NormPosition,
    QkNorm,
    Rope,
    YarnScaling,
)
from ingot.nn.decoder import Decoder
from ingot.nn.layout import KVSpec
from ingot.nn.weights import READABLE, SHARD_BYTES, SafetensorsDir, WeightsError, read_json, write

Raw: TypeAlias = dict[str, Any]
"""What config.json holds."""


@dataclass(frozen=True)
class Part:
    """A part of a config, both ways: the fields that keys of config.json say."""

    read: Callable[[Raw], dict[str, Any]]
    write: Callable[[DecoderConfig], Raw]


@dataclass(frozen=True, kw_only=True)
class Family:
    """All that is particular to a `model_type`."""

    architecture: str
    prefix: str
    """What the names of all tensors but the head's begin with; a base model's leave it out."""
    parts: tuple[Part, ...]
    names: Mapping[str, str | tuple[str, ...]]
    """Our parameters' names and theirs: of several, each has some of the rows."""
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Fields that are the same in all of the family."""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What transformers takes for a key that is left out."""
    only: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Values that are supported, of keys that would change the numbers."""
    transposed: frozenset[str] = frozenset()
    ignored: str = r".*\.rotary_emb\.inv_freq"
    """Tensors that are no weights: old files hold constants too."""


def load(
    directory: Path | str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Decoder:
    """The model of a directory, in the dtype of its files unless another is given."""
    directory = Path(directory)
    raw = _raw(directory)
    config = read_config(raw)
    weights = SafetensorsDir(directory)
    family = FAMILIES[raw["model_type"]]
    _tidy(weights, family, config)
    decoder = Decoder.on_meta(config, dtype or _dtype(weights, family))
    # Nothing was allocated so far, nor will be more than the files hold.
    weights.check_matches(views(decoder, raw["model_type"]))
    # What `to_empty` does; but its `empty_like` imports sympy for a tensor on meta: 0.8 s.
    decoder = decoder._apply(lambda meta: torch.empty(meta.shape, dtype=meta.dtype, device=device))
    weights.read(views(decoder, raw["model_type"]))
    decoder.source_config = raw
    return decoder


@dataclass(frozen=True, kw_only=True)
class Description:
    """What the headers of a directory's files say."""

    model_type: str
    config: DecoderConfig
    parameters: int
    bytes: int
    dtypes: Mapping[str, int]
    """How many tensors of each."""
    kv: KVSpec
    """What is kept of a token, in the dtype of the weights."""


def describe(directory: Path | str) -> Description:
    """What a directory holds; no weight is read."""
    directory = Path(directory)
    raw = _raw(directory)
    config, entries = read_config(raw), list(SafetensorsDir(directory).entries.values())
    dtype = entries[0].dtype if entries else torch.float32
    kv_shape = {"kv_heads": config.kv_heads, "head_dim": config.head_dim}
    return Description(
        model_type=raw["model_type"],
        config=config,
        parameters=parameters(directory),
        bytes=sum(entry.bytes for entry in entries),
        dtypes=dtypes(directory),
        kv=KVSpec(layers=config.layers, dtype=dtype, **kv_shape),
    )


def save(decoder: Decoder, directory: Path | str, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config.json and the weights to a directory that has none yet."""
    directory = Path(directory)
    raw = write_config(decoder.config, decoder.source_config, decoder.dtype)
    write(directory, views(decoder, raw["model_type"]), shard_bytes)
    text = json.dumps(raw, indent=2, sort_keys=True) + "\n"
    write_atomic(directory / "config.json", text)


def read_config(raw: Raw) -> DecoderConfig:
    """What config.json says, as a `DecoderConfig`.

    >>> gpt2 = {"model_type": "gpt2", "vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4}
    >>> read_config(gpt2).ffn_dim
    256
    """
    family = _family(raw)
    raw = {**family.defaults, **raw}
    for key, supported in {**_ONLY, **family.only}.items():
        if key in raw and raw[key] not in supported:
            raise ConfigError(
                f"config.json: {key} is {raw[key]!r}"[:300],
                hint=f"supported: {', '.join(map(repr, supported))}",
            )
    fields = dict(family.fixed)
    for part in family.parts:
        fields |= part.read(raw)
    return DecoderConfig(**fields)


def write_config(config: DecoderConfig, origin: Raw | None, dtype: torch.dtype) -> Raw:
    """A config.json that `read_config` reads as this config; from `origin` with all its keys.

    >>> from ingot.nn import preset
    >>> write_config(preset("smollm2-135m"), None, torch.bfloat16)["architectures"]
    ['LlamaForCausalLM']
    """
    raw = _expressed(config, origin or {})
    key = "torch_dtype" if "torch_dtype" in raw and "dtype" not in raw else "dtype"
    return {**raw, key: str(dtype).removeprefix("torch.")}


def views(decoder: Decoder, model_type: str) -> dict[str, Tensor]:
    """The decoder's parameters under the names of the family: views, nothing is copied."""
    family, config = FAMILIES[model_type], decoder.config
    rows = [heads * config.head_dim for heads in (config.heads, config.kv_heads, config.kv_heads)]
    found: dict[str, Tensor] = {}
    for ours, parameter in decoder.named_parameters():
        pattern = re.sub(r"^blocks\.\d+", "blocks.{i}", ours)
        layer = "".join(re.findall(r"^blocks\.(\d+)", ours))
        theirs, tensor = family.names[pattern], parameter.detach()
        if isinstance(theirs, tuple):
            parts = tensor.split(rows)
            found |= {n.format(i=layer): t for n, t in zip(theirs, parts, strict=True)}
        elif "{e}" in theirs:
            found |= {theirs.format(i=layer, e=e): t for e, t in enumerate(tensor)}
        else:
            found[theirs.format(i=layer)] = tensor.T if pattern in family.transposed else tensor
    return found


def _raw(directory: Path) -> Raw:
    if directory.is_file():
        raise WeightsError(
            f"{directory} is a file, not a model directory",
            hint=f"make one of a GGUF file: ingot import {directory} {directory.stem}",
        )
    if not (directory / "config.json").exists():
        there = f"{directory} has no config.json: it is no model directory"
        raise WeightsError(
            there if directory.exists() else f"there is no {directory}",
            hint="name a model directory; `ingot import` makes one of a GGUF file or of a "
            "Hugging Face directory",
        )
    return read_json(directory / "config.json")


def _family(raw: Raw) -> Family:
    name = raw.get("model_type")
    if not isinstance(name, str):
        raise ConfigError("config.json has no model_type", hint=f"one of {', '.join(FAMILIES)}")
    if name not in FAMILIES:
        raise UnknownName("model_type in config.json:", name[:100], FAMILIES)
    return FAMILIES[name]


def _tidy(weights: SafetensorsDir, family: Family, config: DecoderConfig) -> None:
    """Give the tensors of a file the names they have when transformers writes them now."""
    entries = weights.entries
    if not any(name.startswith(family.prefix) for name in entries):
        weights.entries = entries = {
            name if name == _HEAD else family.prefix + name: entry
            for name, entry in entries.items()
        }
    for name in [name for name in entries if re.fullmatch(family.ignored, name)]:
        del entries[name]
    embed = family.names["tok_embed.weight"]
    if config.tie_embeddings and _HEAD in entries and embed in entries:
        assert isinstance(embed, str)
        if not weights.equal(_HEAD, embed):
            raise WeightsError(
                f"config.json says that the head is tied, but {_HEAD} is not {embed}",
                hint="set tie_word_embeddings to what was meant",
            )
        del entries[_HEAD]


def _dtype(weights: SafetensorsDir, family: Family) -> torch.dtype:
    """That of the embeddings; if they cannot be read, `SafetensorsDir.check_matches` says so."""
    embed = weights.entries.get(str(family.names["tok_embed.weight"]))
    return embed.dtype if embed and embed.dtype in READABLE else torch.float32


def _expressed(config: DecoderConfig, origin: Raw) -> Raw:
    if origin and read_config(origin) == config:
        return origin
    names = [origin["model_type"]] if origin else list(FAMILIES)
    for name in names:
        family = FAMILIES[name]
        raw = {k: v for k, v in origin.items() if k not in ("rope_scaling", "rope_theta")}
        raw |= {"model_type": name, "architectures": [family.architecture]}
        for part in family.parts:
            raw |= part.write(config)
        raw |= {key: values[0] for key, values in family.only.items()}
        try:
            if read_config(raw) == config:
                return raw
        except IngotError:
            continue
    raise ConfigError(
        f"this model cannot be said in a config.json of {' or '.join(names)}",
        hint="transformers has no such model; a family is what its fields are together",
    )


# ---- parts ---------------------------------------------------------------------------------------


def _keys(**keys: str) -> Part:
    """Fields that are what a key says."""

    def read(raw: Raw) -> dict[str, Any]:
        for key in keys.values():
            if key not in raw:
                raise ConfigError(f"config.json has no {key}", hint="add what it should be")
        return {field: raw[key] for field, key in keys.items()}

    return Part(read, lambda config: {key: getattr(config, f) for f, key in keys.items()})


def _read_heads(raw: Raw) -> dict[str, Any]:
    """Key-value heads and channels of a head, which may be left to what follows from the others."""
    heads, kv_heads = raw["num_attention_heads"], raw.get("num_key_value_heads")
    head_dim = raw.get("head_dim")
    if head_dim is None:
        head_dim = _divided(raw["hidden_size"], heads)
    return {"kv_heads": heads if kv_heads is None else kv_heads, "head_dim": head_dim}


def _divided(dim: Any, heads: Any) -> int:
    if not (type(dim) is int and type(heads) is int and heads > 0 and dim % heads == 0):
        raise ConfigError(
            f"config.json: {dim!r} channels in {heads!r} heads"[:200],
            hint="give heads that divide the channels",
        )
    return dim // heads


_ROPES: dict[str, type | None] = {
    "default": None,
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
}
_ROPE_ONLY = {"partial_rotary_factor": (None, 1.0), "truncate": (None, True)}


def _read_rope(raw: Raw) -> dict[str, Any]:
    said = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(said, dict):
        raise ConfigError(f"config.json: rope_parameters is {said!r}"[:200], hint="give a table")
    said = {"rope_theta": raw["rope_theta"], **said}
    kind = said.pop("rope_type", said.pop("type", "default"))
    theta = _number("rope_theta", said.pop("rope_theta"))
    if not (isinstance(kind, str) and kind in _ROPES):
        raise UnknownName("rope_type in config.json:", str(kind)[:100], _ROPES)
    said.pop("type", None)
    scaling = _ROPES[kind]
    keys = _scaling_keys(scaling)
    for key, value in said.items():
        known = key in keys or key == "original_max_position_embeddings"
        if not known and value not in _ROPE_ONLY.get(key, (None,)):
            raise ConfigError(
                f"config.json: {key} of the rotary positions is {value!r}"[:300],
                hint=f"rope_type {kind} is supported with {', '.join(keys) or 'no key'}",
            )
    if scaling is None:
        return {"rope": Rope(theta=theta)}
    values = {key: _number(key, said[key]) for key in keys if said.get(key) is not None}
    if (original := "original_max_position_embeddings") in values:
        values[original] = int(values[original])
    required = {f.name for f in dataclasses.fields(scaling) if f.default is dataclasses.MISSING}
    if missing := sorted(required - values.keys()):
        raise ConfigError(
            f"config.json: the rotary positions have no {missing[0]}",
            hint=f"rope_type {kind} needs {', '.join(sorted(required))}",
        )
    return {"rope": Rope(theta=theta, scaling=scaling(**values))}


def _scaling_keys(scaling: type | None) -> list[str]:
    """Keys of config.json for a RoPE scaling: the fields of its class."""
    return [field.name for field in dataclasses.fields(scaling)] if scaling else []


def _number(key: str, value: Any) -> float:
    if type(value) not in (int, float) or abs(value) > 1e18:
        raise ConfigError(f"config.json: {key} is {value!r}"[:200], hint="give a number")
    return float(value)


def _write_rope(config: DecoderConfig) -> Raw:
    if config.rope is None:
        return {}
    said: Raw = {"rope_theta": config.rope.theta, "rope_type": "default"}
    for kind, scaling in _ROPES.items():
        if scaling and isinstance(config.rope.scaling, scaling):
            said["rope_type"] = kind
            said |= dataclasses.asdict(config.rope.scaling)
    return {"rope_parameters": said}


def _read_window(raw: Raw) -> dict[str, Any]:
    return {"sliding_window": raw["sliding_window"]}


def _read_layered_window(raw: Raw) -> dict[str, Any]:
    """Qwen: `layer_types` says which layers have it, or else all from `max_window_layers` on."""
    window = raw["sliding_window"] if raw["use_sliding_window"] else None
    count, kinds = raw["num_hidden_layers"], raw["layer_types"]
    if kinds is None:
        first = raw["max_window_layers"]
        if type(first) is not int or type(count) is not int:
            raise ConfigError(f"config.json: max_window_layers is {first!r}"[:200], hint="a number")
        chosen = range(max(first, 0), min(count, 2**16))
    elif isinstance(kinds, list) and all(kind in _LAYER_TYPES for kind in kinds):
        if len(kinds) != count:
            raise ConfigError(
                f"config.json: {len(kinds)} layer_types for {count!r} layers"[:200],
                hint="give one for each layer",
            )
        chosen = [layer for layer, kind in enumerate(kinds) if kind == _LAYER_TYPES[1]]
    else:
        raise ConfigError(
            f"config.json: layer_types is {kinds!r}"[:300],
            hint=f"supported: a list of {' and '.join(_LAYER_TYPES)}",
        )
    if window is None or not chosen:
        return {}
    everywhere = len(chosen) == count
    return {
        "sliding_window": window,
        "sliding_window_layers": None if everywhere else tuple(chosen),
    }


def _write_layered_window(config: DecoderConfig) -> Raw:
    return {
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
        "layer_types": [_LAYER_TYPES[window is not None] for window in config.window_per_layer],
    }


_LAYER_TYPES = ("full_attention", "sliding_attention")


def _read_switched_window(raw: Raw) -> dict[str, Any]:
    return {"sliding_window": raw["sliding_window"] if raw["use_sliding_window"] else None}


def _read_experts(raw: Raw) -> dict[str, Any]:
    """Mixtral: all layers, each expert as wide as the MLP would be."""
    for key in ("num_local_experts", "num_experts_per_tok", "intermediate_size"):
        if key not in raw:
            raise ConfigError(f"config.json has no {key}", hint="add what it should be")
    count, top_k = raw["num_local_experts"], raw["num_experts_per_tok"]
    return {"moe": MoEConfig(num_experts=count, top_k=top_k, ffn_dim=raw["intermediate_size"])}


def _write_experts(config: DecoderConfig) -> Raw:
    experts = config.moe
    if experts is None:
        return {}
    return {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.top_k}


def _read_some_experts(raw: Raw) -> dict[str, Any]:
    """Qwen3-MoE: every so many layers, and not in `mlp_only_layers`."""
    count = raw.get("num_local_experts", raw.get("num_experts"))
    for key in ("num_experts_per_tok", "moe_intermediate_size"):
        if key not in raw:
            raise ConfigError(f"config.json has no {key}", hint="add what it should be")
    step, dense, layers = (
        raw["decoder_sparse_step"],
        raw["mlp_only_layers"] or [],
        raw["num_hidden_layers"],
    )
    if not (type(step) is int and step > 0 and isinstance(dense, list) and type(layers) is int):
        raise ConfigError(
            f"config.json: decoder_sparse_step is {step!r}, mlp_only_layers {dense!r}"[:300],
            hint="give a number of layers, and a list of layers",
        )
    chosen = [i for i in range(min(layers, 2**16)) if i not in dense and (i + 1) % step == 0]
    if not chosen:
        return {"moe": None}
    experts = MoEConfig(
        num_experts=count,  # pyright: ignore[reportArgumentType]  # checked by MoEConfig
        top_k=raw["num_experts_per_tok"],
        ffn_dim=raw["moe_intermediate_size"],
        norm_topk_prob=raw["norm_topk_prob"],
        layers=None if len(chosen) == layers else tuple(chosen),
    )
    return {"moe": experts}


def _write_some_experts(config: DecoderConfig) -> Raw:
    experts = config.moe
    if experts is None:
        return {}
    return {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.ffn_dim,
        "norm_topk_prob": experts.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, sparse in enumerate(config.is_moe_layer) if not sparse],
    }


_ACTIVATIONS = {
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu": Activation.GELU,
    "relu": Activation.RELU,
}


def _read_gpt2(raw: Raw) -> dict[str, Any]:
    """Widths that follow from others, and the activation."""
    dim, name = raw.get("n_embd"), raw["activation_function"]
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UnknownName("activation_function in config.json:", str(name)[:100], _ACTIVATIONS)
    return {
        "kv_heads": raw.get("n_head"),
        "head_dim": _divided(dim, raw.get("n_head")),
        "ffn_dim": 4 * dim if raw["n_inner"] is None else raw["n_inner"],  # pyright: ignore
        "activation": _ACTIVATIONS[name],
    }


def _write_gpt2(config: DecoderConfig) -> Raw:
    names = [name for name, kind in _ACTIVATIONS.items() if kind is config.activation]
    return {"n_inner": config.ffn_dim, "activation_function": (names or [""])[0]}


# ---- families ------------------------------------------------------------------------------------

_HEAD = "lm_head.weight"

# Keys that change the numbers in some family, and what they are where they do not.
_ONLY: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
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

_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
_HEADS = Part(_read_heads, lambda c: {"num_key_value_heads": c.kv_heads, "head_dim": c.head_dim})
_ROPE = Part(_read_rope, _write_rope)
_BIASES = _keys(qkv_bias="attention_bias", o_bias="attention_bias")
_WINDOW = Part(_read_window, lambda c: {"sliding_window": c.sliding_window})
_LAYERED_WINDOW = Part(_read_layered_window, _write_layered_window)
_SWITCHED_WINDOW = Part(
    _read_switched_window,
    lambda c: {
        "use_sliding_window": c.sliding_window is not None,
        "sliding_window": c.sliding_window,
    },
)
_PLAIN = (_keys(**_SIZES), _HEADS, _ROPE)
_DEFAULTS = {"tie_word_embeddings": False, "rope_theta": 10000.0, "rms_norm_eps": 1e-6}
_SILU = {"hidden_act": ("silu", "swish")}
_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}

_LAYER = "model.layers.{i}."
_NAMES: dict[str, str | tuple[str, ...]] = {
    "tok_embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": _HEAD,
    **{
        f"blocks.{{i}}.attention.qkv.{kind}": tuple(
            f"{_LAYER}self_attn.{x}_proj.{kind}" for x in "qkv"
        )
        for kind in ("weight", "bias")
    },
    "blocks.{i}.attention.out.weight": _LAYER + "self_attn.o_proj.weight",
    "blocks.{i}.attention.out.bias": _LAYER + "self_attn.o_proj.bias",
    "blocks.{i}.attention.q_norm.weight": _LAYER + "self_attn.q_norm.weight",
    "blocks.{i}.attention.k_norm.weight": _LAYER + "self_attn.k_norm.weight",
    "blocks.{i}.attention_norm.weight": _LAYER + "input_layernorm.weight",
    "blocks.{i}.mlp_norm.weight": _LAYER + "post_attention_layernorm.weight",
    "blocks.{i}.mlp.gate.weight": _LAYER + "mlp.gate_proj.weight",
    "blocks.{i}.mlp.up.weight": _LAYER + "mlp.up_proj.weight",
    "blocks.{i}.mlp.down.weight": _LAYER + "mlp.down_proj.weight",
}
_OLMO2_NAMES = {
    **_NAMES,
    "blocks.{i}.attention_norm.weight": _LAYER + "post_attention_layernorm.weight",
    "blocks.{i}.mlp_norm.weight": _LAYER + "post_feedforward_layernorm.weight",
}
_MIXTRAL_NAMES = {
    **_NAMES,
    "blocks.{i}.mlp.router.weight": _LAYER + "block_sparse_moe.gate.weight",
    "blocks.{i}.mlp.gate": _LAYER + "block_sparse_moe.experts.{e}.w1.weight",
    "blocks.{i}.mlp.down": _LAYER + "block_sparse_moe.experts.{e}.w2.weight",
    "blocks.{i}.mlp.up": _LAYER + "block_sparse_moe.experts.{e}.w3.weight",
}
_QWEN3_MOE_NAMES = {
    **_NAMES,
    "blocks.{i}.mlp.router.weight": _LAYER + "mlp.gate.weight",
    "blocks.{i}.mlp.gate": _LAYER + "mlp.experts.{e}.gate_proj.weight",
    "blocks.{i}.mlp.up": _LAYER + "mlp.experts.{e}.up_proj.weight",
    "blocks.{i}.mlp.down": _LAYER + "mlp.experts.{e}.down_proj.weight",
}
_GPT2_NAMES = {
    "tok_embed.weight": "transformer.wte.weight",
    "pos_embed.weight": "transformer.wpe.weight",
    "lm_head.weight": _HEAD,
    **{
        f"{ours}.{kind}": f"transformer.{theirs}.{kind}"
        for kind in ("weight", "bias")
        for ours, theirs in {
            "norm": "ln_f",
            "blocks.{i}.attention_norm": "h.{i}.ln_1",
            "blocks.{i}.mlp_norm": "h.{i}.ln_2",
            "blocks.{i}.attention.qkv": "h.{i}.attn.c_attn",
            "blocks.{i}.attention.out": "h.{i}.attn.c_proj",
            "blocks.{i}.mlp.up": "h.{i}.mlp.c_fc",
            "blocks.{i}.mlp.down": "h.{i}.mlp.c_proj",
        }.items()
    },
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        prefix="model.",
        parts=(*_PLAIN, _BIASES),
        names=_NAMES,
        defaults={**_DEFAULTS, "attention_bias": False},
        only={**_SILU, "mlp_bias": (False,)},
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        prefix="transformer.",
        parts=(
            _keys(
                vocab_size="vocab_size",
                dim="n_embd",
                layers="n_layer",
                heads="n_head",
                max_seq_len="n_positions",
                norm_eps="layer_norm_epsilon",
                tie_embeddings="tie_word_embeddings",
            ),
            Part(_read_gpt2, _write_gpt2),
        ),
        names=_GPT2_NAMES,
        fixed={"norm": NormKind.LAYER, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
        defaults={
            "n_positions": 1024,
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        only={
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        },
        transposed=frozenset(
            f"blocks.{{i}}.{name}.weight"
            for name in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
        ),
        ignored=r".*\.h\.\d+\.attn\.(masked_)?bias",
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        prefix="model.",
        parts=(*_PLAIN, _WINDOW),
        names=_NAMES,
        defaults={**_DEFAULTS, "sliding_window": 4096},
        only={**_SILU, "layer_types": (None,)},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        prefix="model.",
        parts=(*_PLAIN, _LAYERED_WINDOW),
        names=_NAMES,
        fixed={"qkv_bias": True},
        defaults={**_DEFAULTS, **_QWEN_WINDOW, "max_window_layers": 28, "layer_types": None},
        only=_SILU,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        prefix="model.",
        parts=(*_PLAIN, _BIASES, _LAYERED_WINDOW),
        names=_NAMES,
        fixed={"qk_norm": QkNorm.PER_HEAD},
        defaults={
            **_DEFAULTS,
            **_QWEN_WINDOW,
            "max_window_layers": 28,
            "layer_types": None,
            "attention_bias": False,
            "head_dim": 128,
        },
        only=_SILU,
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        prefix="model.",
        parts=(*_PLAIN, _BIASES),
        names=_OLMO2_NAMES,
        fixed={"norm_position": NormPosition.POST, "qk_norm": QkNorm.FULL},
        defaults={**_DEFAULTS, "rms_norm_eps": 1e-5, "attention_bias": False},
        only=_SILU,
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        prefix="model.",
        parts=(*_PLAIN, _WINDOW, Part(_read_experts, _write_experts)),
        names=_MIXTRAL_NAMES,
        defaults={
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "sliding_window": None,
        },
        only=_SILU,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        prefix="model.",
        parts=(*_PLAIN, _BIASES, _SWITCHED_WINDOW, Part(_read_some_experts, _write_some_experts)),
        names=_QWEN3_MOE_NAMES,
        fixed={"qk_norm": QkNorm.PER_HEAD},
        defaults={
            **_DEFAULTS,
            **_QWEN_WINDOW,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
            "norm_topk_prob": False,
        },
        only=_SILU,
    ),
}
