"""Formats of quantized weights: the tensors that hold a weight, and how they are computed.

    tensors = Int4(group=64).encode(weight_ND)      # round to nearest
    Int4(group=64).decode(tensors)                  # about weight_ND, in float32
    Int4(group=64).linear(x, tensors, LinearEpilogue())     # about x @ weight_ND.T

A format is a type with its layout. The modules of `ingot.nn.quantized` hold the tensors; nothing
else has to know the format of a weight.

Legend: N rows (output channels), D channels, G groups of channels.
"""

from __future__ import annotations

from ingot.nn.formats.format import Grid, LinearEpilogue, QuantizedTensors, WeightFormat
from ingot.nn.formats.int4 import Int4
from ingot.nn.formats.int8 import Int8
from ingot.ops.codec import GROUP_SIZES, INT8_GROUP_SIZES

__all__ = [
    "GROUP_SIZES",
    "INT8_GROUP_SIZES",
    "Grid",
    "Int4",
    "Int8",
    "LinearEpilogue",
    "QuantizedTensors",
    "WeightFormat",
]
