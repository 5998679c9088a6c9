"""Quantized weights as the compressed-tensors library stores them, for vLLM and transformers.

A quantized layer has, instead of its `weight`:

    pack-quantized   weight_packed      (N, D / 8) int32: 8 channels of 4 bits, the first one lowest
                     weight_scale       (N, G)
                     weight_zero_point  (N / 8, G) int32: 8 rows, unless it is symmetric
                     weight_shape       (2,) int64: N and D
    int-quantized    weight             (N, D) int8
                     weight_scale       (N, 1), or (N, G)

Integers are stored plus 8 where they are packed. The library has no format with a minimum, such as
GGUF's Q4_1. It is stored as pack-quantized with a `weight_minimum`, (N, G), and the `quant_method`
of the directory is "ingot", which other programs reject.

Legend: N rows (output channels), D channels, G groups of channels.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ingot.core.errors import ConfigError
from ingot.interop.quantization_scheme import (
    HINT,
    KEY,
    LayerGroup,
    Layout,
    QuantizationScheme,
    TensorShapes,
    check_finite,
)
from ingot.nn.formats import (
    GROUP_SIZES,
    INT8_GROUP_SIZES,
    Int4,
    Int8,
    QuantizedTensors,
    WeightFormat,
)

METHOD, OWN_METHOD = "compressed-tensors", "ingot"
_PACKED, _INTEGER, _MIXED = "pack-quantized", "int-quantized", "mixed-precision"
_PER_WORD = 8
_MAX_GROUPS = 64


def read_scheme(config: Mapping[str, Any]) -> QuantizationScheme:
    """Return the scheme of a `quantization_config`."""
    groups, ignore = config.get("config_groups"), config.get("ignore") or []
    if not isinstance(groups, dict) or not 1 <= len(groups) <= _MAX_GROUPS:
        raise ConfigError(f"{KEY}: config_groups must have 1 to {_MAX_GROUPS} groups", hint=HINT)
    return QuantizationScheme(
        tuple(_read_group(group, config) for group in groups.values()),
        COMPRESSED_TENSORS,
        _read_names("ignore", ignore),
    )


def _read_names(key: str, names: Any) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{KEY}: {key} must be a list of names", hint=HINT)
    return tuple(names)


def _read_group(group: Any, config: Mapping[str, Any]) -> LayerGroup:
    if not isinstance(group, dict):
        raise ConfigError(f"{KEY}: a group of layers must be an object", hint=HINT)
    targets = _read_names("targets", group.get("targets"))
    if not targets or "Embedding" in targets:
        raise ConfigError(f"{KEY}: unsupported targets {targets}"[:200], hint=HINT)
    kind = group.get("format") or config.get("format")
    return LayerGroup(_read_format(kind, group.get("weights"), config), targets)


def _read_format(kind: Any, weights: Any, config: Mapping[str, Any]) -> WeightFormat:
    if not isinstance(weights, dict) or weights.get("type", "int") != "int":
        raise ConfigError(f"{KEY}: weights must be integers", hint=HINT)
    bits, symmetric = weights.get("num_bits"), weights.get("symmetric", True)
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if weights.get("actorder") not in (None, "static", "weight"):
        raise ConfigError(f"{KEY}: actorder {weights['actorder']!r}"[:200], hint=HINT)
    sizes = INT8_GROUP_SIZES if bits == 8 else GROUP_SIZES
    if strategy != "group":
        size = None
    elif size not in sizes:
        raise ConfigError(
            f"{KEY}: group_size must be one of {', '.join(map(str, sizes))}, got {size!r}",
            hint=HINT,
        )
    minimum = config.get("quant_method") == OWN_METHOD and weights.get("minimum") is True
    if kind == _PACKED and bits == 4 and size is not None:
        return Int4(group=size, zero_point=not symmetric and not minimum, minimum=minimum)
    if kind == _INTEGER and bits == 8 and symmetric and strategy in ("channel", "group"):
        return Int8(group=size)
    raise ConfigError(
        f"{KEY}: unsupported weights: {kind!r}, {bits!r} bits, {strategy!r}"[:200], hint=HINT
    )


def write_scheme(scheme: QuantizationScheme) -> dict[str, Any]:
    """Return the `quantization_config` of a scheme.

    >>> scheme = QuantizationScheme((LayerGroup(Int4(group=64)),), COMPRESSED_TENSORS)
    >>> write_scheme(scheme)["format"]
    'pack-quantized'
    """
    groups = [_write_group(group) for group in scheme.groups]
    kinds = {group["format"] for group in groups}
    standard = not any(group["weights"].get("minimum") for group in groups)
    return {
        "quant_method": METHOD if standard else OWN_METHOD,
        "quantization_status": "compressed",
        "format": kinds.pop() if len(kinds) == 1 else _MIXED,
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": list(scheme.ignore),
        "kv_cache_scheme": None,
    }


def _write_group(group: LayerGroup) -> dict[str, Any]:
    format = group.format
    weights: dict[str, Any] = {"type": "int", "dynamic": False, "observer": "minmax"}
    activations: dict[str, Any] | None = None
    if isinstance(format, Int4):
        weights |= {"num_bits": 4, "strategy": "group", "group_size": format.group}
        weights["symmetric"] = not format.zero_point and not format.minimum
        weights |= {"minimum": True} if format.minimum else {}
    else:
        assert isinstance(format, Int8)
        strategy = "channel" if format.group is None else "group"
        weights |= {"num_bits": 8, "strategy": strategy, "group_size": format.group}
        weights["symmetric"] = True
        activations = {"type": "int", "num_bits": 8, "dynamic": True, "symmetric": True}
        activations["strategy"] = "token"
    return {
        "targets": list(group.targets),
        "format": _PACKED if isinstance(format, Int4) else _INTEGER,
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }


def tensor_shapes(format: WeightFormat, rows: int, channels: int) -> TensorShapes:
    """Return the tensors of a layer on disk, by suffix.

    >>> tensor_shapes(Int4(group=32), 16, 64)["weight_packed"]
    ((16, 8), torch.int32)
    """
    if isinstance(format, Int8):
        groups = channels // format.group if format.group else 1
        return {
            "weight": ((rows, channels), torch.int8),
            "weight_scale": ((rows, groups), None),
        }
    assert isinstance(format, Int4)
    groups = channels // format.group
    shapes: TensorShapes = {
        "weight_packed": ((rows, channels // _PER_WORD), torch.int32),
        "weight_scale": ((rows, groups), None),
        "weight_shape": ((2,), torch.int64),
    }
    if format.zero_point:
        shapes["weight_zero_point"] = ((-(-rows // _PER_WORD), groups), torch.int32)
    if format.minimum:
        shapes["weight_minimum"] = ((rows, groups), None)
    return shapes


def count_values(name: str, shape: Sequence[int]) -> int:
    """Count the weights that a tensor on disk has: none if it has the scales of others.

    >>> count_values("model.layers.0.mlp.up_proj.weight_packed", (16, 8))
    1024
    """
    kind = name.rpartition(".")[2]
    if kind in ("weight_scale", "weight_zero_point", "weight_minimum", "weight_shape"):
        return 0
    return math.prod(shape) * (_PER_WORD if kind == "weight_packed" else 1)


def unpack(format: WeightFormat, tensors: Mapping[str, Tensor], layer: str) -> QuantizedTensors:
    """Convert the tensors of a layer on disk to those of its format."""
    scale, minimum = tensors["weight_scale"], tensors.get("weight_minimum")
    for values in (scale, minimum):
        if values is not None:
            check_finite(values, layer)
    if isinstance(format, Int8):
        return QuantizedTensors(tensors["weight"], scale[:, 0] if format.group is None else scale)
    packed = tensors["weight_packed"]
    shape = tuple(tensors["weight_shape"].tolist())
    if shape != (len(packed), packed.shape[1] * _PER_WORD):
        raise ConfigError(
            f"{layer}: weight_shape is {shape}, weight_packed {tuple(packed.shape)}",
            hint="download the weights again",
        )
    zero_point = tensors.get("weight_zero_point")
    if zero_point is not None:
        zero_point = _unpack_rows(zero_point, len(packed))
    return QuantizedTensors(packed.view(torch.uint8), scale, zero_point, minimum)


def pack(format: WeightFormat, tensors: QuantizedTensors) -> dict[str, Tensor]:
    """Convert the tensors of a format to those of a layer on disk; the inverse of `unpack`."""
    weight, scale, zero_point, minimum = tensors
    scale = scale.reshape(len(weight), -1)
    if isinstance(format, Int8):
        return {"weight": weight, "weight_scale": scale}
    stored = {
        "weight_packed": weight.contiguous().view(torch.int32),
        "weight_scale": scale,
        "weight_shape": torch.tensor([len(weight), 2 * weight.shape[1]]),
    }
    if zero_point is not None:
        stored["weight_zero_point"] = _pack_rows(zero_point)
    if minimum is not None:
        stored["weight_minimum"] = minimum
    return stored


COMPRESSED_TENSORS = Layout(tensor_shapes, unpack)


def _unpack_rows(packed: Tensor, rows: int) -> Tensor:
    """Return integers from 0 to 15, (N, G), that are packed along the rows."""
    shifts = 4 * torch.arange(_PER_WORD, dtype=torch.int32)
    values = packed[:, None, :] >> shifts[:, None] & 15
    return values.flatten(0, 1)[:rows]


def _pack_rows(values: Tensor) -> Tensor:
    padded = torch.zeros(-(-len(values) // _PER_WORD) * _PER_WORD, values.shape[1])
    padded[: len(values)] = values.float()
    words = padded.to(torch.int64).unflatten(0, (-1, _PER_WORD))
    shifts = 4 * torch.arange(_PER_WORD)
    return (words << shifts[:, None]).sum(1).to(torch.int32)
