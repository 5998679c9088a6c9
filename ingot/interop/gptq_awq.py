"""Checkpoints of 4 bits as AutoGPTQ, GPTQModel and AutoAWQ write them.

A quantized layer has, instead of its `weight`, tensors with the channels first:

    gptq   qweight  (D / 8, N) int32: 8 channels of 4 bits, the first one lowest
           qzeros   (G, N / 8) int32: 8 rows; one less than the zero point, except in "gptq_v2"
           scales   (G, N)
           g_idx    (D,) int32: the group of each channel
    awq    qweight  (D, N / 8) int32: 8 rows, in the order 0, 2, 4, 6, 1, 3, 5, 7
           qzeros   (G, N / 8) int32: 8 rows, in the same order
           scales   (G, N)

Legend: N rows (output channels), D channels, G groups of channels.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Mapping
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
from ingot.nn.formats import GROUP_SIZES, Int4, QuantizedTensors, WeightFormat

_PER_WORD = 8
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_FORMATS = ("gptq", "gptq_v2")


def read_gptq(config: Mapping[str, Any]) -> QuantizationScheme:
    """Return the scheme of a `quantization_config` whose `quant_method` is "gptq"."""
    _check(config, "bits", 4)
    stored = config.get("checkpoint_format", "gptq")
    if stored not in _FORMATS:
        raise ConfigError(f"{KEY}: checkpoint_format {stored!r}"[:200], hint=HINT)
    format = Int4(group=_group_size(config), zero_point=config.get("sym") is not True)
    layout = GPTQ_V1 if stored == "gptq" else GPTQ_V2
    return QuantizationScheme((LayerGroup(format),), layout)


def read_awq(config: Mapping[str, Any]) -> QuantizationScheme:
    """Return the scheme of a `quantization_config` whose `quant_method` is "awq"."""
    for key, value in (("bits", 4), ("zero_point", True), ("version", "gemm")):
        _check(config, key, value)
    unquantized = config.get("modules_to_not_convert") or []
    if unquantized not in ([], ["lm_head"]):
        raise ConfigError(f"{KEY}: modules_to_not_convert {unquantized!r}"[:200], hint=HINT)
    format = Int4(group=_group_size(config), zero_point=True)
    return QuantizationScheme((LayerGroup(format),), AWQ)


def _check(config: Mapping[str, Any], key: str, value: Any) -> None:
    if config.get(key, value) != value or (key == "bits" and key not in config):
        raise ConfigError(f"{KEY}: {key} must be {value!r}, got {config.get(key)!r}", hint=HINT)


def _group_size(config: Mapping[str, Any]) -> int:
    size = config.get("group_size")
    if size not in GROUP_SIZES:
        sizes = ", ".join(map(str, GROUP_SIZES))
        raise ConfigError(f"{KEY}: group_size must be one of {sizes}, got {size!r}", hint=HINT)
    return size


def _gptq_shapes(format: WeightFormat, rows: int, channels: int) -> TensorShapes:
    shapes = _awq_shapes(format, rows, channels)
    shapes["qweight"] = (channels // _PER_WORD, rows), torch.int32
    shapes["g_idx"] = (channels,), torch.int32
    return shapes


def _awq_shapes(format: WeightFormat, rows: int, channels: int) -> TensorShapes:
    assert isinstance(format, Int4)
    groups = channels // format.group
    return {
        "qweight": ((channels, rows // _PER_WORD), torch.int32),
        "qzeros": ((groups, rows // _PER_WORD), torch.int32),
        "scales": ((groups, rows), None),
    }


def _unpack_gptq_v1(
    format: WeightFormat, tensors: Mapping[str, Tensor], layer: str
) -> QuantizedTensors:
    return _unpack_gptq(format, tensors, layer, offset=1)


def _unpack_gptq(
    format: WeightFormat, tensors: Mapping[str, Tensor], layer: str, offset: int = 0
) -> QuantizedTensors:
    assert isinstance(format, Int4)
    channels = torch.arange(len(tensors["g_idx"]))
    if not torch.equal(tensors["g_idx"], (channels // format.group).int()):
        raise ConfigError(
            f"{layer}: the groups of channels are not consecutive (desc_act)",
            hint="use a checkpoint with desc_act=false",
        )
    zero_NG = _unpack_columns(tensors["qzeros"]).T.int() + offset
    if not format.zero_point and not bool((zero_NG == 8).all()):
        raise ConfigError(f"{layer}: zero points differ from 8 although sym is true", hint=HINT)
    weight = tensors["qweight"].T.contiguous().view(torch.uint8)
    return _tensors(format, weight, tensors, zero_NG, layer)


def _unpack_awq(
    format: WeightFormat, tensors: Mapping[str, Tensor], layer: str
) -> QuantizedTensors:
    q_ND = _unpack_columns(tensors["qweight"], _AWQ_ORDER).T
    weight = q_ND[:, ::2] | q_ND[:, 1::2] << 4
    zero_NG = _unpack_columns(tensors["qzeros"], _AWQ_ORDER).T
    return _tensors(format, weight, tensors, zero_NG, layer)


def _tensors(
    format: WeightFormat,
    weight: Tensor,
    tensors: Mapping[str, Tensor],
    zero_NG: Tensor,
    layer: str,
) -> QuantizedTensors:
    assert isinstance(format, Int4)
    check_finite(tensors["scales"], layer)
    return QuantizedTensors(weight, tensors["scales"].T, zero_NG if format.zero_point else None)


def _unpack_columns(packed: Tensor, order: tuple[int, ...] = tuple(range(_PER_WORD))) -> Tensor:
    """Return integers from 0 to 15 whose columns are packed; `order[i]` is in the i-th 4 bits."""
    shifts = 4 * torch.tensor(order).argsort().int()
    return (packed[..., None] >> shifts & 15).flatten(-2).to(torch.uint8)


GPTQ_V1 = Layout(_gptq_shapes, _unpack_gptq_v1, "scales")
GPTQ_V2 = Layout(_gptq_shapes, _unpack_gptq, "scales")
AWQ = Layout(_awq_shapes, _unpack_awq, "scales")
