"""Model directories of classifiers: a stack of dense layers, a CNN or a residual network.

    config.json          {"model_type": "cnn", "widths": [32, 64], ...,
                          "inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 8, 8]}],
                          "outputs": [{"name": "logits", "datatype": "FP32", "shape": [10]}]}
    model.safetensors    the weights, and the statistics of batch norms
    ingot.json           lineage

`ingot train` writes them, and `ingot serve` serves them over the Open Inference Protocol. An input
may have any numeric datatype: the model converts it to the dtype of its weights. The output is in
float32.
"""

# pyright: basic
from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from ingot.core.errors import ConfigError, UnknownName
from ingot.core.paths import write_atomic
from ingot.interop.directory import CONFIG, count_dtypes, count_parameters
from ingot.interop.signature import Signature, TensorSpec
from ingot.nn import CNN, CNNConfig, Dense, DenseConfig, ResNet, ResNetConfig
from ingot.nn.weights import READABLE, SafetensorsDir, read_json, write

Classifier = Dense | CNN | ResNet
ClassifierConfig = DenseConfig | CNNConfig | ResNetConfig
_MODELS: dict[str, tuple[Any, Any]] = {
    "dense": (DenseConfig, Dense),
    "cnn": (CNNConfig, CNN),
    "resnet": (ResNetConfig, ResNet),
}
_OTHER_KEYS = ("model_type", "inputs", "outputs")
_HINT = "restore config.json as `ingot train` wrote it"


@dataclass(frozen=True, kw_only=True)
class ClassifierDescription:
    """The directory of a classifier as its config and the headers of its weights describe it."""

    model_type: str
    config: ClassifierConfig
    signature: Signature
    parameters: int
    bytes: int
    dtypes: Mapping[str, int]
    """Number of tensors of each dtype."""


def save(model: Classifier, directory: Path | str, row_shape: Sequence[int]) -> None:
    """Write config.json and the weights to a directory that has no weights yet.

    `row_shape` is that of a sample: a CNN can compute images of any size, but a served model has
    one.
    """
    directory = Path(directory)
    spec = TensorSpec(name="input", datatype="FP32", shape=tuple(row_shape))
    signature = Signature(inputs=(spec,), outputs=(_output(model.config, "logits"),))
    _check_signature(model.config, signature)
    write(directory, _stored_tensors(model))
    fields = {f.name: getattr(model.config, f.name) for f in dataclasses.fields(model.config)}
    raw = {"model_type": fields.pop("kind"), **fields, **msgspec.to_builtins(signature)}
    write_atomic(directory / CONFIG, json.dumps(raw, indent=2) + "\n")


def load(directory: Path | str, device: torch.device | str = "cpu") -> tuple[Classifier, Signature]:
    """Load the classifier of a directory in evaluation mode, and its signature."""
    directory = Path(directory)
    config, signature = read_config(read_json(directory / CONFIG))
    weights = SafetensorsDir(directory)
    # Modules take time and memory to build, even on `meta`.
    if isinstance(config, ResNetConfig):
        num_blocks = len(config.widths) * config.blocks_per_stage
        if num_blocks > len(weights.entries):
            raise ConfigError(
                f"config.json has {num_blocks:,} blocks, the weights {len(weights.entries):,} "
                "tensors",
                hint="check that config.json belongs to these weights",
            )
    _, build = _MODELS[config.kind]
    with torch.device("meta"):
        model = build(config).to(_weights_dtype(weights)).eval()
    weights.check_matches(_stored_tensors(model))  # before memory is allocated
    # Unlike this, `to_empty` imports sympy: 0.8 s.
    model._apply(lambda meta: torch.zeros(meta.shape, dtype=meta.dtype, device=device))
    weights.read(_stored_tensors(model))
    return model, signature


def describe(directory: Path | str) -> ClassifierDescription:
    """Describe the classifier of a directory without reading its weights."""
    directory = Path(directory)
    config, signature = read_config(read_json(directory / CONFIG))
    entries = SafetensorsDir(directory).entries
    return ClassifierDescription(
        model_type=config.kind,
        config=config,
        signature=signature,
        parameters=count_parameters(directory),
        bytes=sum(entry.bytes for entry in entries.values()),
        dtypes=count_dtypes(directory),
    )


def read_config(raw: dict[str, Any]) -> tuple[ClassifierConfig, Signature]:
    """Return the configuration and the signature of a config.json.

    >>> spec = {"name": "x", "datatype": "FP32", "shape": [2]}
    >>> config, signature = read_config(
    ...     {"model_type": "dense", "in_features": 2, "hidden_dims": [8], "out_features": 2,
    ...      "inputs": [spec], "outputs": [spec | {"name": "logits"}]})
    >>> config.hidden_dims, signature.outputs[0].shape
    ((8,), (2,))
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in _MODELS:
        raise UnknownName("model_type of a classifier:", str(model_type)[:100], _MODELS)
    config_type, _ = _MODELS[model_type]
    names = [field.name for field in dataclasses.fields(config_type) if field.name != "kind"]
    for key in raw:
        if key not in names and key not in _OTHER_KEYS:
            raise UnknownName("key in config.json:", key[:100], [*names, *_OTHER_KEYS])
    try:
        values = {name: raw[name] for name in names if name in raw}
        config = msgspec.convert(values, config_type)
        tensors = {name: raw.get(name) for name in ("inputs", "outputs")}
        signature = msgspec.convert(tensors, Signature)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"config.json: {error}"[:300], hint=_HINT) from error
    _check_signature(config, signature)
    return config, signature


def _check_signature(config: ClassifierConfig, signature: Signature) -> None:
    """Raise unless the model computes these outputs from these inputs."""
    if len(signature.inputs) != 1 or len(signature.outputs) != 1:
        raise ConfigError("a classifier has one input and one output", hint=_HINT)
    (input,), (output,) = signature.inputs, signature.outputs
    if isinstance(config, DenseConfig):
        fits = math.prod(input.shape) == config.in_features
    else:
        image = (1, *input.shape) if len(input.shape) == 2 else input.shape
        fits = len(image) == 3 and image[0] == config.in_channels
    if not fits or input.datatype == "BYTES":
        raise ConfigError(
            f"{input.name}: the model cannot compute {input.datatype} of shape {input.shape}",
            hint=_HINT,
        )
    if output != _output(config, output.name):
        raise ConfigError(
            f"{output.name}: the model computes {_output(config, output.name)}", hint=_HINT
        )


def _output(config: ClassifierConfig, name: str) -> TensorSpec:
    classes = config.out_features if isinstance(config, DenseConfig) else config.num_classes
    return TensorSpec(name=name, datatype="FP32", shape=(classes,))


def _stored_tensors(model: Classifier) -> dict[str, Tensor]:
    """Return weights and statistics; the number of training batches is not stored."""
    return {name: t for name, t in model.state_dict().items() if t.is_floating_point()}


def _weights_dtype(weights: SafetensorsDir) -> torch.dtype:
    """Return the dtype of the first tensor; `check_matches` rejects an unreadable one."""
    dtypes = (entry.dtype for entry in weights.entries.values() if entry.dtype in READABLE)
    return next(dtypes, torch.float32)
