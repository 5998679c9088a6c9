"""Quantized weights as the compressed-tensors library stores them, for vLLM and transformers.

A quantized layer has, instead of its `weight`:

    pack-quantized   weight_packed      (N, D / 8) int32: 8 channels of 4 bits, the first one lowest
                     weight_scale       (N, G)
                     weight_zero_point  (N / 8, G) int32: 8 rows, unless it is symmetric
                     weight_shape       (2,) int64: N and D
    int-quantized    weight             (N, D) int8
                     weight_scale       (N, 1), or (N, G)

Integers are stored plus 8 where they are packed. `quantization_config` in config.json names the
formats and the layers that have them: see `read_scheme` and `write_scheme`.

Legend: N rows (output channels), D channels, G groups of channels.
"""

# pyright: basic
from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ingot.core.errors import ConfigError
from ingot.nn.formats import GROUP_SIZES, Int4, Int8, QuantizedTensors, WeightFormat
from ingot.nn.weights import StoredTensor

KEY = "quantization_config"
METHOD = "compressed-tensors"
_PACKED, _INTEGER = "pack-quantized", "int-quantized"
_PER_WORD = 8
_MAX_PATTERN = 200
_HINT = "quantize the model with `ingot compress`, or use the original one"

TensorShapes = dict[str, StoredTensor]
"""By suffix of the tensor's name."""


@dataclass(frozen=True)
class QuantizationScheme:
    """Which layers of a directory are quantized, and how."""

    format: WeightFormat
    ignore: tuple[str, ...] = ("lm_head",)
    """Layers that are not quantized: names, or regular expressions that begin with `re:`."""

    def format_of(self, layer: str) -> WeightFormat | None:
        """Return the format of a linear layer by its name in the directory.

        >>> QuantizationScheme(Int8(), ("re:.*down",)).format_of("model.layers.0.mlp.down_proj")
        """
        return None if any(_matches(pattern, layer) for pattern in self.ignore) else self.format


def read_scheme(raw: Mapping[str, Any]) -> QuantizationScheme | None:
    """Return the scheme of a config.json; None for a model that is not quantized."""
    config = raw.get(KEY)
    if config is None:
        return None
    if not isinstance(config, dict) or config.get("quant_method") != METHOD:
        method = config.get("quant_method") if isinstance(config, dict) else config
        raise ConfigError(f"unsupported {KEY}: {method!r}"[:200], hint=_HINT)
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ConfigError(f"{KEY}: expected one of config_groups", hint=_HINT)
    (group,) = groups.values()
    ignore = config.get("ignore") or []
    if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        raise ConfigError(f'{KEY}: targets must be ["Linear"]', hint=_HINT)
    if not isinstance(ignore, list) or not all(isinstance(name, str) for name in ignore):
        raise ConfigError(f"{KEY}: ignore must be a list of names", hint=_HINT)
    return QuantizationScheme(_read_format(config.get("format"), group), tuple(ignore))


def _read_format(kind: Any, group: Mapping[str, Any]) -> WeightFormat:
    weights = group.get("weights")
    if not isinstance(weights, dict) or weights.get("type", "int") != "int":
        raise ConfigError(f"{KEY}: weights must be integers", hint=_HINT)
    bits, symmetric = weights.get("num_bits"), weights.get("symmetric", True)
    size, strategy = weights.get("group_size"), weights.get("strategy")
    if weights.get("actorder") not in (None, "static", "weight"):
        raise ConfigError(f"{KEY}: actorder {weights['actorder']!r}"[:200], hint=_HINT)
    if strategy != "group":
        size = None
    elif size not in GROUP_SIZES:
        raise ConfigError(
            f"{KEY}: group_size must be one of {', '.join(map(str, GROUP_SIZES))}, got {size!r}",
            hint=_HINT,
        )
    if kind == _PACKED and bits == 4 and size is not None:
        return Int4(group=size, zero_point=not symmetric)
    if kind == _INTEGER and bits == 8 and symmetric and strategy in ("channel", "group"):
        return Int8(group=size)
    raise ConfigError(
        f"{KEY}: unsupported weights: {kind!r}, {bits!r} bits, {strategy!r}"[:200], hint=_HINT
    )


def write_scheme(scheme: QuantizationScheme) -> dict[str, Any]:
    """Return the `quantization_config` of a scheme.

    >>> write_scheme(QuantizationScheme(Int4(group=64)))["format"]
    'pack-quantized'
    """
    format = scheme.format
    weights: dict[str, Any] = {"type": "int", "dynamic": False, "observer": "minmax"}
    activations: dict[str, Any] | None = None
    if isinstance(format, Int4) and not format.minimum:
        weights |= {"num_bits": 4, "strategy": "group", "group_size": format.group}
        weights["symmetric"] = not format.zero_point
    elif isinstance(format, Int8):
        strategy = "channel" if format.group is None else "group"
        weights |= {"num_bits": 8, "strategy": strategy, "group_size": format.group}
        weights["symmetric"] = True
        activations = {"type": "int", "num_bits": 8, "dynamic": True, "symmetric": True}
        activations["strategy"] = "token"
    else:
        raise ConfigError(f"{METHOD} has no format for {format}", hint="choose another format")
    return {
        "quant_method": METHOD,
        "quantization_status": "compressed",
        "format": _PACKED if isinstance(format, Int4) else _INTEGER,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations,
                "output_activations": None,
            }
        },
        "ignore": list(scheme.ignore),
        "kv_cache_scheme": None,
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
    return shapes


def count_values(name: str, shape: Sequence[int]) -> int:
    """Count the weights that a tensor on disk has: none if it has the scales of others.

    >>> count_values("model.layers.0.mlp.up_proj.weight_packed", (16, 8))
    1024
    """
    kind = name.rpartition(".")[2]
    if kind in ("weight_scale", "weight_zero_point", "weight_shape"):
        return 0
    return math.prod(shape) * (_PER_WORD if kind == "weight_packed" else 1)


def unpack(format: WeightFormat, tensors: Mapping[str, Tensor], layer: str) -> QuantizedTensors:
    """Convert the tensors of a layer on disk to those of its format."""
    scale = tensors["weight_scale"]
    if not bool(scale.isfinite().all()):
        raise ConfigError(f"{layer}: a scale is not finite", hint="download the weights again")
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
    return QuantizedTensors(packed.view(torch.uint8), scale, zero_point)


def pack(format: WeightFormat, tensors: QuantizedTensors) -> dict[str, Tensor]:
    """Convert the tensors of a format to those of a layer on disk; the inverse of `unpack`."""
    weight, scale, zero_point, _ = tensors
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
    return stored


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


def _matches(pattern: str, layer: str) -> bool:
    if not pattern.startswith("re:"):
        return pattern == layer
    expression = pattern[3:]
    # A repeated group, or many repetitions, can take forever to match.
    is_slow = re.search(r"[)\]][*+{?]", expression) or len(re.findall(r"[*+{]", expression)) > 4
    if is_slow or len(expression) > _MAX_PATTERN:
        raise ConfigError(f"{KEY}: unsupported pattern {pattern!r}"[:200], hint=_HINT)
    try:
        return re.match(expression, layer) is not None
    except re.error as error:
        raise ConfigError(f"{KEY}: invalid pattern {pattern!r}"[:200], hint=_HINT) from error
