"""LoRA adapters as PEFT directories: adapter_config.json and adapter_model.safetensors.

    adapter = load("my-adapter", decoder)
    save(adapter, "copy")                       # the same tensors, byte for byte

Nothing in the directory is trusted. The config is a table of keys: those that change the
mathematics have a list of supported values, others are bounded and kept, and a key that this
version does not know must have an empty value (null, false, {}, ...). Names, shapes and dtypes of
the tensors are compared with the linear layers of the decoder before memory is allocated. Pickles
(adapter_model.bin) are not opened, and `target_modules` as a regular expression is not evaluated:
the tensors say which layers are adapted.

The tensors of a layer `model.layers.0.self_attn.q_proj` are

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight    (rank, in)
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight    (out, rank)

and its output is `x W.T + scale * (x A.T) B.T` with `scale = lora_alpha / r`, or
`lora_alpha / sqrt(r)` with `use_rslora`.
"""

# pyright: basic
from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ingot.core.errors import IngotError
from ingot.core.paths import atomic_directory, write_atomic
from ingot.interop import hf
from ingot.interop.hf_config import RawConfig
from ingot.interop.hf_families import FAMILIES
from ingot.nn.decoder import Decoder
from ingot.nn.linear import Linear
from ingot.nn.lora import QKV, LoraConfig, LoraKey, LoraWeights
from ingot.nn.quantized import QuantizedLinear
from ingot.nn.weights import READABLE, SafetensorsDir, read_json, write_file

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
MAX_RANK = 512
MAX_ALPHA = 65536.0
_EXPORT_HINT = "save the adapter again with PEFT's save_pretrained"

_REASONS = {
    "use_dora": "DoRA normalizes the columns of the adapted weight",
    "use_qalora": "QALoRA pools the input of A",
    "use_bdlora": "block-diagonal adapters are not supported",
    "alora_invocation_tokens": "activated LoRA applies the adapter to a part of the text",
    "arrow_config": "it routes tokens between adapters",
    "rank_pattern": "all layers of an adapter have the same rank",
    "alpha_pattern": "all layers of an adapter have the same scale",
    "bias": "only A and B are adapted",
    "lora_bias": "B has no bias",
    "modules_to_save": "the base model's own weights cannot be replaced",
    "trainable_token_indices": "embeddings are not adapted",
    "target_parameters": "only linear layers are adapted",
    "layer_replication": "the adapter belongs to a model with other layers",
    "init_lora_weights": "this initialization changes the base model's weights",
    "task_type": "the model has a language-modeling head",
}
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
    "task_type": ("CAUSAL_LM",),
}
"""Supported values of keys, besides the empty ones: null, false, "", {} and []."""
_NEUTRAL = {
    # Descriptions
    *("base_model_name_or_path", "revision", "peft_version", "auto_mapping", "inference_mode"),
    # Which layers are adapted: the tensors say so too
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    # How training begins
    *("eva_config", "corda_config", "loftq_config", "lora_ga_config", "ensure_weight_tying"),
    # The layout of the base weight, and settings of what is switched off
    *("fan_in_fan_out", "megatron_core", "qalora_group_size"),
    # Read below
    *("peft_type", "r", "lora_alpha", "lora_dropout", "use_rslora"),
}
"""Keys whose values do not change the mathematics, or are read by `read_config`."""


class AdapterError(IngotError):
    """An adapter that is damaged, not supported, or does not belong to the model."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter: the matrices A and B of each adapted layer, and their scale.

    >>> config = new_config(LoraConfig(rank=2, alpha=4.0), ["q_proj"])
    >>> adapter = Adapter(config, {"model.layers.0.self_attn.q_proj": (torch.ones(2, 8),) * 2})
    >>> adapter.rank, adapter.scale, adapter.nbytes
    (2, 2.0, 128)
    """

    config: RawConfig
    """Content of adapter_config.json."""
    weights: Mapping[str, tuple[Tensor, Tensor]]
    """A (rank, in) and B (out, rank) by the layer's name in a Hugging Face model."""

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.config["r"]

    @property
    def scale(self) -> float:
        """Factor of `B A`."""
        alpha, rank = float(self.config["lora_alpha"]), self.rank
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    @property
    def nbytes(self) -> int:
        """Size of the tensors."""
        return sum(a.nbytes + b.nbytes for a, b in self.weights.values())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their names in the file."""
        return {
            f"{PREFIX}{layer}.lora_{kind}.weight": tensor
            for layer, pair in self.weights.items()
            for kind, tensor in zip("AB", pair, strict=True)
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the config and the tensors; it identifies what the adapter computes."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
            digest.update(content.numpy())  # pyright: ignore[reportArgumentType]
        return digest.hexdigest()


def load(directory: Path | str, decoder: Decoder) -> Adapter:
    """Read the adapter of a directory for this decoder, in the dtype of its file."""
    directory = Path(directory)
    config, header = read_config(directory), _read_header(directory)
    layers = _check_layers(header, config, target_layers(decoder))
    tensors = {name: torch.empty(e.shape, dtype=e.dtype) for name, e in header.entries.items()}
    header.read(tensors)
    weights = {
        layer: (
            tensors[f"{PREFIX}{layer}.lora_A.weight"],
            tensors[f"{PREFIX}{layer}.lora_B.weight"],
        )
        for layer in layers
    }
    return Adapter(config, weights)


def save(adapter: Adapter, directory: Path | str) -> None:
    """Write the adapter to a directory that does not exist yet, or is empty."""
    with atomic_directory(Path(directory), adapter.nbytes) as temporary:
        write(adapter, temporary)


def write(adapter: Adapter, directory: Path) -> None:
    """Write the files of the adapter into a directory."""
    write_file(directory / WEIGHTS, adapter.tensors)
    write_atomic(directory / CONFIG, json.dumps(adapter.config, indent=2, sort_keys=True))


def lora_weights(adapter: Adapter, decoder: Decoder) -> dict[LoraKey, LoraWeights]:
    """Return the matrices for `Decoder.set_adapter`, which takes the transpose of PEFT's B."""
    layers = target_layers(decoder)
    return {layers[name].key: LoraWeights(a, b.T) for name, (a, b) in adapter.weights.items()}


def from_weights(
    weights: Mapping[LoraKey, LoraWeights],
    config: LoraConfig,
    decoder: Decoder,
    base: str | None = None,
) -> Adapter:
    """Return an adapter that was trained: `Decoder.lora_weights` and its config.

    `base` is the name or path of the base model, for those who load the adapter.
    """
    names = {layer.key: name for name, layer in target_layers(decoder).items()}
    pairs = {names[key]: (a, b.T.contiguous()) for key, (a, b) in weights.items()}
    targets = sorted({name.rpartition(".")[2] for name in pairs})
    return Adapter(new_config(config, targets, base), pairs)


def new_config(config: LoraConfig, targets: Sequence[str], base: str | None = None) -> RawConfig:
    """Return an adapter_config.json as PEFT writes it, without keys that have their defaults.

    >>> new_config(LoraConfig(rank=8, alpha=16), ["q_proj", "v_proj"])["lora_alpha"]
    16
    """
    alpha = config.alpha
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": config.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": config.rank,
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


@torch.no_grad()
def merge_(decoder: Decoder, adapter: Adapter) -> None:
    """Add `scale * B A` to the weights of a decoder, in float32, and round them to its dtype."""
    layers = target_layers(decoder)
    for name, (a, b) in adapter.weights.items():
        layer = layers[name]
        if isinstance(decoder.get_submodule(layer.module), QuantizedLinear):
            raise AdapterError(
                "an adapter cannot be merged into quantized weights",
                hint="merge it into the original model, then quantize that: ingot compress",
            )
        weight = decoder.get_parameter(f"{layer.module}.weight")
        rows = weight.narrow(0, layer.first, layer.out_features)
        delta = adapter.scale * (b.float() @ a.float())
        rows.copy_(rows.float() + delta.to(rows.device))


class TargetLayer(NamedTuple):
    """A linear layer as a Hugging Face model has it: rows of the weight of one of ours."""

    key: LoraKey
    module: str
    """Name of our module."""
    first: int
    """First of its rows."""
    out_features: int
    in_features: int


def target_layers(decoder: Decoder) -> dict[str, TargetLayer]:
    """Return the linear layers of the blocks by their names in a Hugging Face model.

    >>> from ingot.nn import preset
    >>> layers = target_layers(Decoder.on_meta(preset("tiny")))
    >>> layers["model.layers.0.self_attn.k_proj"]._asdict()
    {'key': (0, 'k_proj'), 'module': 'blocks.0.attention.qkv', 'first': 64, 'out_features': 32, \
'in_features': 64}
    """
    config = decoder.config
    raw = hf.write_config(config, decoder.source_config, decoder.dtype)
    family = FAMILIES[raw["model_type"]]
    heads = [count * config.head_dim for count in (config.heads, config.kv_heads, config.kv_heads)]
    layers: dict[str, TargetLayer] = {}
    for ours, module in decoder.named_modules():
        found = re.fullmatch(r"blocks\.(\d+)\.(.+)", ours)
        if found is None or not isinstance(module, Linear | QuantizedLinear):
            continue
        if config.moe and found[2].startswith("mlp."):
            continue  # as in `Decoder.add_lora`: the experts of other layers have the same names
        parts = ("mlp.gate", "mlp.up") if found[2] == "mlp.gate_up" else (found[2],)
        first = 0
        for part in parts:
            theirs = family.tensor_names[f"blocks.{{i}}.{part}.weight"]
            targets, rows = _TARGETS[part], [module.out_features // len(parts)]
            if isinstance(theirs, tuple):
                targets, rows = ("q_proj", "k_proj", "v_proj"), heads
            names = (theirs,) if isinstance(theirs, str) else theirs
            for name, target, count in zip(names, targets, rows, strict=True):
                layer = name.format(i=found[1]).removesuffix(".weight")
                key = int(found[1]), target
                layers[layer] = TargetLayer(key, ours, first, count, module.in_features)
                first += count
    return layers


_TARGETS = {
    "attention.qkv": (QKV,),
    "attention.out": ("o_proj",),
    "mlp.gate": ("gate_proj",),
    "mlp.up": ("up_proj",),
    "mlp.down": ("down_proj",),
}
"""Targets of our modules; where a family has three tensors for `qkv`, it has three targets."""


# Reading


def read_config(directory: Path | str) -> RawConfig:
    """Read adapter_config.json; raise unless it is supported."""
    path = Path(directory) / CONFIG
    if not path.exists():
        raise AdapterError(
            f"{CONFIG} not found in {path.parent}",
            hint="name a directory as PEFT's save_pretrained writes it",
        )
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        kind = str(config.get("peft_type"))[:100]
        raise AdapterError(
            f"{path}: peft_type must be LORA, got {kind}", hint="name a LoRA adapter"
        )
    for key, value in config.items():
        if value and key not in _NEUTRAL and value not in _SUPPORTED.get(key, ()):
            reason = _REASONS.get(key, "this version of ingot does not know the key")
            raise AdapterError(
                f"{path}: {key[:100]} = {repr(value)[:100]} is not supported: {reason}",
                hint="merge the adapter with PEFT and serve the merged model",
            )
    _check_number(path, config, "r", 1, MAX_RANK)
    _check_number(path, config, "lora_alpha", 1e-6, MAX_ALPHA)
    _check_number(path, config, "lora_dropout", 0, 1)
    if not isinstance(config["r"], int) or not isinstance(config.get("use_rslora", False), bool):
        raise AdapterError(f"{path}: r must be an integer, use_rslora a boolean", hint=_EXPORT_HINT)
    _target_modules(path, config)
    return config


def _check_number(path: Path, config: RawConfig, key: str, low: float, high: float) -> None:
    value = config.get(key, 0)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and low <= value <= high):
        raise AdapterError(
            f"{path}: expected {key} from {low:g} to {high:g}, got {repr(value)[:100]}",
            hint=_EXPORT_HINT,
        )


def _target_modules(path: Path, config: RawConfig) -> tuple[str, ...] | None:
    """Return the names of `target_modules`; None if it is an expression."""
    targets = config.get("target_modules")
    if isinstance(targets, str):
        return None
    if not (isinstance(targets, list) and all(isinstance(name, str) for name in targets)):
        raise AdapterError(f"{path}: target_modules must be a list of names", hint=_EXPORT_HINT)
    return tuple(targets)


def _read_header(directory: Path) -> SafetensorsDir:
    if not (directory / WEIGHTS).exists():
        pickled = (directory / "adapter_model.bin").exists()
        raise AdapterError(
            f"{directory} has its weights as a pickle, which can run code and is not opened"
            if pickled
            else f"{WEIGHTS} not found in {directory}",
            hint="save the adapter with PEFT: save_pretrained(directory) writes safetensors",
        )
    return SafetensorsDir(directory, WEIGHTS)


def _check_layers(
    header: SafetensorsDir, config: RawConfig, targets: Mapping[str, TargetLayer]
) -> list[str]:
    """Return the names of the adapted layers; raise unless each has an A and a B that fit."""
    path, rank = header.directory / WEIGHTS, config["r"]
    layers = {_layer_name(path, name, targets): None for name in sorted(header.entries)}
    named = _target_modules(header.directory / CONFIG, config)
    for layer in layers:
        target = targets[layer]
        shapes = {"A": (rank, target.in_features), "B": (target.out_features, rank)}
        for kind, shape in shapes.items():
            name = f"{PREFIX}{layer}.lora_{kind}.weight"
            entry = header.entries.get(name)
            if entry is None or entry.shape != shape or entry.dtype not in READABLE:
                got = "none" if entry is None else f"{entry.dtype} of {entry.shape}"
                raise AdapterError(
                    f"{path}: '{name}' must be floating point of shape {shape}, got {got}",
                    hint="give the adapter to the model that it was trained on",
                )
        if named is not None and not any(f".{layer}".endswith(f".{name}") for name in named):
            raise AdapterError(
                f"{path}: layer '{layer}' is not in target_modules", hint=_EXPORT_HINT
            )
    if not layers:
        raise AdapterError(f"{path} has no tensors", hint=_EXPORT_HINT)
    return list(layers)


def _layer_name(path: Path, name: str, targets: Mapping[str, TargetLayer]) -> str:
    found = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_[AB]\.weight", name)
    if found is None or found[1] not in targets:
        raise AdapterError(
            f"{path}: '{name[:200]}' is not the A or B of a linear layer of this model",
            hint="give the adapter to the model it was trained on; embeddings, the LM head and "
            "experts cannot be adapted",
        )
    return found[1]
