"""Hugging Face model directories: config.json and *.safetensors, read and written.

    decoder = load("SmolLM2-135M-Instruct")
    save(decoder, "copy")                       # the same tensors, byte for byte
    encoder = load_encoder("all-MiniLM-L6-v2")

The tensors of a family are views of the decoder's parameters: q, k and v are rows of one weight,
the weight of an expert is a slice of that of all experts, and GPT-2's transposed weights are
transposed views. Loading fills the views, saving writes them. Quantized layers are converted one by
one from and to what `ingot.interop.compressed_tensors` describes, or from what
`ingot.interop.gptq_awq` does.

No code from a directory is run, and pickles are not opened.
"""

# pyright: basic
from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ingot.core.errors import ConfigError, IngotError, UnknownName
from ingot.core.paths import write_atomic
from ingot.interop import compressed_tensors, gptq_awq
from ingot.interop.compressed_tensors import COMPRESSED_TENSORS
from ingot.interop.directory import count_dtypes, count_parameters
from ingot.interop.hf_config import Family, RawConfig
from ingot.interop.hf_families import ENCODERS, FAMILIES, LM_HEAD
from ingot.interop.quantization_scheme import (
    HINT,
    KEY,
    Layout,
    QuantizationScheme,
    describe_layers,
)
from ingot.interop.signature import CLASSIFIERS
from ingot.nn.config import DecoderConfig, EncoderConfig
from ingot.nn.decoder import Decoder
from ingot.nn.encoder import Encoder
from ingot.nn.formats import WeightFormat
from ingot.nn.layout import KVSpec
from ingot.nn.linear import Linear
from ingot.nn.quantized import QuantizedEmbedding, QuantizedModule, quantize_
from ingot.nn.shared import SharedWeights
from ingot.nn.weights import (
    READABLE,
    SHARD_BYTES,
    SafetensorsDir,
    StoredTensor,
    WeightsError,
    read_json,
    write,
)


def load(
    directory: Path | str,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    shared: SharedWeights | None = None,
) -> Decoder:
    """Load the model of a directory, by default in the dtype of its files; into `shared` memory, or
    from it, if given."""
    directory = Path(directory)
    raw = _read_raw_config(directory)
    config, family = read_config(raw), FAMILIES[raw["model_type"]]
    weights = SafetensorsDir(directory)
    _normalize_names(weights, family, config)
    decoder = Decoder.on_meta(config, dtype or _weights_dtype(weights, family))
    scheme = _read_scheme(raw)
    if scheme is not None:
        _quantize_on_meta(decoder, family, scheme, weights)
    layout = scheme.layout if scheme else COMPRESSED_TENSORS
    # Nothing is allocated before this check, so a config cannot claim more memory than the files.
    stored = {
        name: shape
        for layer in _quantized_layers(decoder, family)
        for name, shape in layer.shapes(layout)
    }
    weights.check_matches(named_views(decoder, family), stored)

    def read() -> None:
        _allocate(decoder, device)
        weights.read(named_views(decoder, family))
        for layer in _quantized_layers(decoder, family):
            layer.read(weights, layout)

    read() if shared is None else shared.load(decoder, read)
    decoder.source_config = raw
    return decoder


def save(decoder: Decoder, directory: Path | str, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config.json and the weights to a directory that has no weights yet."""
    directory = Path(directory)
    raw = write_config(decoder.config, decoder.source_config, decoder.dtype)
    family = FAMILIES[raw["model_type"]]
    tensors = named_views(decoder, family)
    raw = {key: value for key, value in raw.items() if key != KEY}
    if scheme := _scheme_of(decoder, family):
        raw[KEY] = compressed_tensors.write_scheme(scheme)
    for layer in _quantized_layers(decoder, family):
        tensors |= layer.stored()
    write(directory, tensors, shard_bytes)
    text = json.dumps(raw, indent=2, sort_keys=True) + "\n"
    write_atomic(directory / "config.json", text)


def load_encoder(
    directory: Path | str,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    shared: SharedWeights | None = None,
) -> Encoder:
    """Load the encoder of a directory, without its pooler or the head of another task."""
    directory = Path(directory)
    raw = _read_raw_config(directory)
    config, family = read_encoder_config(raw), ENCODERS[raw["model_type"]]
    if raw.get(KEY) is not None:
        raise ConfigError(f"{KEY} of encoders is not supported", hint=HINT)
    weights = SafetensorsDir(directory)
    _normalize_encoder_names(weights, family)
    encoder = Encoder.on_meta(config, dtype or _weights_dtype(weights, family))
    weights.check_matches(named_views(encoder, family))

    def read() -> None:
        _allocate(encoder, device)
        weights.read(named_views(encoder, family))

    read() if shared is None else shared.load(encoder, read)
    encoder.source_config = raw
    return encoder


def save_encoder(encoder: Encoder, directory: Path | str) -> None:
    """Write config.json and the weights to a directory that has no weights yet."""
    directory, source = Path(directory), encoder.source_config or {}
    family = ENCODERS[source.get("model_type", "bert")]
    raw = family.write(encoder.config, source)
    raw["dtype"] = str(encoder.dtype).removeprefix("torch.")
    write(directory, named_views(encoder, family))
    write_atomic(directory / "config.json", json.dumps(raw, indent=2, sort_keys=True) + "\n")


def is_encoder(directory: Path | str) -> bool:
    """Return whether the model of a directory is an encoder."""
    return _read_raw_config(Path(directory)).get("model_type") in ENCODERS


def _allocate(model: Decoder | Encoder, device: torch.device | str) -> None:
    """Allocate a model that is on `meta`.

    Like `to_empty`, whose `empty_like` imports sympy for a meta tensor: 0.8 s.
    """
    model._apply(lambda meta: torch.empty(meta.shape, dtype=meta.dtype, device=device))


@dataclass(frozen=True, kw_only=True)
class Description:
    """A model directory as its config and the headers of its weights describe it."""

    model_type: str
    config: DecoderConfig
    parameters: int
    bytes: int
    dtypes: Mapping[str, int]
    """Number of tensors of each dtype."""
    kv: KVSpec
    """The KV cache of a token, in the dtype of the weights."""


def describe(directory: Path | str) -> Description:
    """Describe the model of a directory without reading its weights."""
    directory = Path(directory)
    raw = _read_raw_config(directory)
    config, weights = read_config(raw), SafetensorsDir(directory)
    family = FAMILIES[raw["model_type"]]
    _normalize_names(weights, family, config)
    dtype = _weights_dtype(weights, family)
    kv_shape = {"kv_heads": config.kv_heads, "head_dim": config.head_dim}
    return Description(
        model_type=raw["model_type"],
        config=config,
        parameters=count_parameters(directory),
        bytes=sum(entry.bytes for entry in weights.entries.values()),
        dtypes=count_dtypes(directory),
        kv=KVSpec(layers=config.layers, dtype=dtype, **kv_shape),
    )


@dataclass(frozen=True, kw_only=True)
class EncoderDescription:
    """The directory of an encoder as its config and the headers of its weights describe it."""

    model_type: str
    config: EncoderConfig
    parameters: int
    bytes: int
    dtypes: Mapping[str, int]
    """Number of tensors of each dtype."""


def describe_encoder(directory: Path | str) -> EncoderDescription:
    """Describe the encoder of a directory without reading its weights."""
    directory = Path(directory)
    raw, entries = _read_raw_config(directory), SafetensorsDir(directory).entries
    return EncoderDescription(
        model_type=raw["model_type"],
        config=read_encoder_config(raw),
        parameters=count_parameters(directory),
        bytes=sum(entry.bytes for entry in entries.values()),
        dtypes=count_dtypes(directory),
    )


def read_config(raw: RawConfig) -> DecoderConfig:
    """Return the configuration of a config.json.

    >>> gpt2 = {"model_type": "gpt2", "vocab_size": 99, "n_embd": 64, "n_layer": 2, "n_head": 4}
    >>> read_config(gpt2).ffn_dim
    256
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ConfigError("config.json has no model_type", hint=f"add one of {', '.join(FAMILIES)}")
    if model_type in ENCODERS:
        raise ConfigError(
            f"the model is an encoder ({model_type}): it generates no text",
            hint="compute embeddings with it: ingot.Embedder, or /v1/embeddings of `ingot serve`",
        )
    if model_type not in FAMILIES:
        if model_type in CLASSIFIERS:
            raise ConfigError(
                f"the model is a classifier ({model_type}): it generates no text",
                hint="serve it over the Open Inference Protocol: ingot serve",
            )
        raise UnknownName("model_type in config.json:", model_type[:100], FAMILIES)
    return FAMILIES[model_type].read(raw)


def read_encoder_config(raw: RawConfig) -> EncoderConfig:
    """Return the configuration of an encoder's config.json.

    >>> read_encoder_config({"model_type": "bert", "num_hidden_layers": 6}).layers
    6
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ENCODERS:
        raise UnknownName("model_type of an encoder:", str(model_type)[:100], ENCODERS)
    return ENCODERS[model_type].read(raw)


def write_config(config: DecoderConfig, source: RawConfig | None, dtype: torch.dtype) -> RawConfig:
    """Return a config.json that `read_config` reads as this configuration.

    Keys of `source`, the config.json that the model was loaded from, are kept.

    >>> from ingot.nn import preset
    >>> write_config(preset("smollm2-135m"), None, torch.bfloat16)["architectures"]
    ['LlamaForCausalLM']
    """
    raw = _express(config, source or {})
    key = "torch_dtype" if "torch_dtype" in raw and "dtype" not in raw else "dtype"
    return {**raw, key: str(dtype).removeprefix("torch.")}


def _express(config: DecoderConfig, source: RawConfig) -> RawConfig:
    if source and read_config(source) == config:
        return source
    names = [source["model_type"]] if source else list(FAMILIES)
    for name in names:
        raw = FAMILIES[name].write(config, source)
        try:
            if read_config(raw) == config:
                return raw
        except IngotError:
            continue
    raise ConfigError(
        "this configuration cannot be expressed as a Hugging Face config.json (tried: "
        f"{', '.join(names)})",
        hint="use a combination of fields that one of these architectures has",
    )


def named_views(model: Decoder | Encoder, family: Family) -> dict[str, Tensor]:
    """Return views of the model's parameters by the tensor names of the family."""
    config = model.config
    rows = [heads * config.head_dim for heads in (config.heads, config.kv_heads, config.kv_heads)]
    views: dict[str, Tensor] = {}
    for ours, parameter in model.named_parameters():
        if ".lora." in ours:
            continue  # adapters are files of their own: `ingot.interop.peft`
        pattern = re.sub(r"^blocks\.\d+", "blocks.{i}", ours)
        layer = "".join(re.findall(r"^blocks\.(\d+)", ours))
        theirs, tensor = family.tensor_names[pattern], parameter.detach()
        if isinstance(theirs, tuple):
            parts = tensor.split(rows)
            views |= {n.format(i=layer): t for n, t in zip(theirs, parts, strict=True)}
        elif "{e}" in theirs:
            views |= {theirs.format(i=layer, e=e): t for e, t in enumerate(tensor)}
        else:
            views[theirs.format(i=layer)] = tensor.T if pattern in family.transposed else tensor
    return views


@dataclass(frozen=True)
class _QuantizedLayer:
    """A layer of the directory, and the rows of a quantized module that are its weight."""

    name: str
    module: QuantizedModule
    rows: slice

    def shapes(self, layout: Layout) -> Iterator[tuple[str, StoredTensor]]:
        rows = self.rows.stop - self.rows.start
        shapes = layout.tensor_shapes(self.module.format, rows, self.module.channels)
        return ((f"{self.name}.{suffix}", shape) for suffix, shape in shapes.items())

    def read(self, weights: SafetensorsDir, layout: Layout) -> None:
        tensors: dict[str, Tensor] = {}
        for name, (shape, dtype) in self.shapes(layout):
            tensors[name] = torch.empty(shape, dtype=dtype or weights.entries[name].dtype)
        weights.read(tensors)
        stored = {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}
        self.module.set(layout.unpack(self.module.format, stored, self.name), self.rows)

    def stored(self) -> dict[str, Tensor]:
        packed = compressed_tensors.pack(self.module.format, self.module.get(self.rows))
        return {f"{self.name}.{suffix}": tensor for suffix, tensor in packed.items()}


def _layer_names(family: Family, module: str) -> list[str]:
    """Return the layers of the directory whose rows are the weight of a module."""
    pattern = re.sub(r"^blocks\.\d+", "blocks.{i}", module)
    number = "".join(re.findall(r"^blocks\.(\d+)", module))
    parts = [pattern.replace("gate_up", x) for x in ("gate", "up")]
    names: list[str] = []
    for part in parts if pattern.endswith("gate_up") else [pattern]:
        theirs = family.tensor_names[f"{part}.weight"]
        names += [theirs] if isinstance(theirs, str) else theirs
    return [name.format(i=number).removesuffix(".weight") for name in names]


def _quantized_layers(decoder: Decoder, family: Family) -> Iterator[_QuantizedLayer]:
    config = decoder.config
    qkv = [heads * config.head_dim for heads in (config.heads, config.kv_heads, config.kv_heads)]
    for module_name, module in decoder.named_modules():
        if isinstance(module, QuantizedModule):
            names = _layer_names(family, module_name)
            each = module.rows // len(names)
            sizes = qkv if module_name.endswith("qkv") else [each] * len(names)
            ends = list(accumulate(sizes))
            for name, begin, end in zip(names, [0, *ends], ends, strict=False):
                yield _QuantizedLayer(name, module, slice(begin, end))


def _quantize_on_meta(
    decoder: Decoder, family: Family, scheme: QuantizationScheme, weights: SafetensorsDir
) -> None:
    """Replace the modules that are quantized in the directory, without memory."""
    _check_quantizable(decoder, family)

    def choose(module: str) -> WeightFormat | None:
        names = _layer_names(family, module)
        formats = {scheme.format_of(name, linear="embed" not in module) for name in names}
        if len(formats) > 1:
            raise ConfigError(
                f"{', '.join(names)}: all must have the same format", hint="use the original model"
            )
        format, entry = formats.pop(), weights.entries.get(f"{names[0]}.{scheme.layout.scale}")
        if format is None or entry is None or entry.dtype not in READABLE:
            return format
        return replace(format, scale_dtype=entry.dtype)  # pyright: ignore

    quantize_(decoder, choose)


def stored_bytes(decoder: Decoder, format: WeightFormat) -> dict[str, int]:
    """Return the size on disk that each linear layer of the blocks has in a format.

    >>> from ingot.nn import preset
    >>> from ingot.nn.formats import Int4
    >>> stored_bytes(Decoder.on_meta(preset("tiny")), Int4())["blocks.1.mlp.down"]
    5776
    """
    raw = write_config(decoder.config, decoder.source_config, decoder.dtype)
    meta = Decoder.on_meta(decoder.config, decoder.dtype)
    quantize_(meta.blocks, lambda _: format)
    names = {module: name for name, module in meta.named_modules()}
    sizes: dict[str, int] = {}
    for layer in _quantized_layers(meta, FAMILIES[raw["model_type"]]):
        tensors = [shape for _, shape in layer.shapes(COMPRESSED_TENSORS)]
        size = sum(prod(shape) * (dtype or format.scale_dtype).itemsize for shape, dtype in tensors)
        sizes[names[layer.module]] = sizes.get(names[layer.module], 0) + size
    return sizes


def check_quantizable(decoder: Decoder) -> None:
    """Require a model whose linear layers can be quantized in a directory of its family."""
    raw = write_config(decoder.config, decoder.source_config, decoder.dtype)
    _check_quantizable(decoder, FAMILIES[raw["model_type"]])


def _check_quantizable(decoder: Decoder, family: Family) -> None:
    if family.transposed or decoder.config.moe:
        kind = "mixtures of experts" if decoder.config.moe else family.model_type
        raise ConfigError(
            f"quantized weights are not supported for {kind}", hint="use the original model"
        )


def _read_scheme(raw: RawConfig) -> QuantizationScheme | None:
    config = raw.get(KEY)
    if config is None:
        return None
    method = config.get("quant_method") if isinstance(config, dict) else config
    if not isinstance(method, str) or method not in _SCHEMES:
        raise ConfigError(f"unsupported {KEY}: {method!r}"[:200], hint=HINT)
    return _SCHEMES[method](config)


_SCHEMES = {
    compressed_tensors.METHOD: compressed_tensors.read_scheme,
    compressed_tensors.OWN_METHOD: compressed_tensors.read_scheme,
    "gptq": gptq_awq.read_gptq,
    "awq": gptq_awq.read_awq,
}


def _scheme_of(decoder: Decoder, family: Family) -> QuantizationScheme | None:
    """Return the scheme that describes a decoder, None if it is not quantized."""
    linear: dict[str, WeightFormat | None] = {} if decoder.lm_head else {"lm_head": None}
    embeddings: dict[str, WeightFormat | None] = {}
    for module_name, module in decoder.named_modules():
        format = None
        if isinstance(module, QuantizedModule):
            format = replace(module.format, scale_dtype=torch.bfloat16)  # pyright: ignore
        elif not isinstance(module, Linear):
            continue
        layers = embeddings if isinstance(module, QuantizedEmbedding) else linear
        layers |= dict.fromkeys(_layer_names(family, module_name), format)
    scheme = describe_layers(linear, embeddings, COMPRESSED_TENSORS)
    if scheme is not None:
        _check_quantizable(decoder, family)
    return scheme


def _read_raw_config(directory: Path) -> RawConfig:
    if directory.is_file():
        raise WeightsError(
            f"{directory} is a file, not a model directory",
            hint=f"convert a GGUF file first: ingot import {directory} {directory.stem}",
        )
    if not (directory / "config.json").exists():
        raise WeightsError(
            f"{directory} is not a model directory: it has no config.json"
            if directory.exists()
            else f"directory not found: {directory}",
            hint="name a model directory; `ingot import` creates one from a GGUF file or a "
            "Hugging Face directory",
        )
    return read_json(directory / "config.json")


def _normalize_names(weights: SafetensorsDir, family: Family, config: DecoderConfig) -> None:
    """Rename the tensors of older or base-model files to the names transformers writes now."""
    entries = weights.entries
    if not any(name.startswith(family.prefix) for name in entries):
        weights.entries = entries = {
            name if name == LM_HEAD else family.prefix + name: entry
            for name, entry in entries.items()
        }
    for name in [name for name in entries if re.fullmatch(family.ignored_tensors, name)]:
        del entries[name]
    embedding = str(family.tensor_names["tok_embed.weight"])
    if config.tie_embeddings and LM_HEAD in entries and embedding in entries:
        if not weights.equal(LM_HEAD, embedding):
            raise WeightsError(
                f"tie_word_embeddings is true in config.json, but {LM_HEAD} and {embedding} differ",
                hint="set tie_word_embeddings to false if the LM head has weights of its own",
            )
        del entries[LM_HEAD]


def _normalize_encoder_names(weights: SafetensorsDir, family: Family) -> None:
    """Remove the prefix and the tensors of another task; rename those of the oldest files."""
    entries = weights.entries
    if any(name.startswith(family.prefix) for name in entries):
        entries = {name.removeprefix(family.prefix): entry for name, entry in entries.items()}
    old = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
    weights.entries = {
        re.sub(r"LayerNorm\.(gamma|beta)$", lambda match: old[match[0]], name): entry
        for name, entry in entries.items()
        if not re.fullmatch(family.ignored_tensors, name)
    }


def _weights_dtype(weights: SafetensorsDir, family: Family) -> torch.dtype:
    """Return the dtype of the embeddings, or of the norm if they are quantized.

    `check_matches` rejects an unreadable one.
    """
    names = (str(family.tensor_names[f"{name}.weight"]) for name in ("tok_embed", "norm"))
    entries = (weights.entries.get(name) for name in names)
    return next((e.dtype for e in entries if e and e.dtype in READABLE), torch.float32)
