"""Blocks of GGUF files as quantized weights of a directory, without dequantizing them.

    type   block     value of element i                     format
    Q4_0   32        d * (q[i] - 8)                         Int4(group=32)
    Q4_1   32        d * q[i] + m                           Int4(group=32, minimum=True)
    Q4_K   8 x 32    d * scale * q[i] - dmin * min          Int4(group=32, minimum=True)
    Q8_0   32        d * q[i]                               Int8(group=32)
    Q6_K   16 x 16   d * scale * (q[i] - 32)                Int8(group=16)

d, m and dmin are float16, like the scales and minima of the formats: weights of Q4_0, Q4_1 and
Q8_0 stay bitwise the same. The scales and minima of Q4_K and Q6_K, for which the file has integers
of 6 and 8 bits, are rounded to float16, a relative error of 2^-11. Other types have no format and
are dequantized.

Legend: R rows, B blocks of a row, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ingot.nn.formats import Int4, Int8, WeightFormat

Array = npt.NDArray[Any]

_MINIMUM = Int4(group=32, minimum=True, scale_dtype=torch.float16)

FORMATS: dict[str, WeightFormat] = {
    "Q4_0": Int4(group=32, scale_dtype=torch.float16),
    "Q4_1": _MINIMUM,
    "Q4_K": _MINIMUM,
    "Q8_0": Int8(group=32, scale_dtype=torch.float16),
    "Q6_K": Int8(group=16, scale_dtype=torch.float16),
}
"""Formats of the types whose blocks are kept."""


def common_format(types: Iterable[str]) -> WeightFormat | None:
    """Return the format of layers that are computed together, such as q, k and v; None without one.

    >>> common_format(["Q4_1", "Q4_K"]) == FORMATS["Q4_1"], common_format(["Q4_K", "Q6_K"])
    (True, None)
    """
    formats = {FORMATS.get(type) for type in types}
    return formats.pop() if len(formats) == 1 else None


def convert_rows(type: str, raw_RC: Array) -> dict[str, Array]:
    """Convert rows of blocks to tensors of `ingot.interop.compressed_tensors`, by suffix.

    >>> block = np.array([[0, 60] + [0x98] * 16], np.uint8)     # d = 1; 16 times 8, 16 times 9
    >>> [hex(word) for word in convert_rows("Q4_0", block)["weight_packed"].view("u4")[0]]
    ['0x88888888', '0x88888888', '0x99999999', '0x99999999']
    """
    return _CONVERTERS[type](raw_RC)


def _q4_0(raw_RC: Array) -> dict[str, Array]:
    blocks_RBC = _blocks(raw_RC, 18)
    return _packed(_halves(blocks_RBC[..., 2:]), _float16(blocks_RBC, 0))


def _q4_1(raw_RC: Array) -> dict[str, Array]:
    blocks_RBC = _blocks(raw_RC, 20)
    scale_RB, minimum_RB = _float16(blocks_RBC, 0), _float16(blocks_RBC, 2)
    return _packed(_halves(blocks_RBC[..., 4:]), scale_RB, minimum_RB)


def _q4_k(raw_RC: Array) -> dict[str, Array]:
    blocks_RBC = _blocks(raw_RC, 144)
    d_RB1, dmin_RB1 = (_float16(blocks_RBC, at).astype(np.float32)[..., None] for at in (0, 2))
    low, high, both = (blocks_RBC[..., at : at + 4] for at in (4, 8, 12))
    # 6 bits each: of groups 0 to 3 in a byte, of groups 4 to 7 in half a byte and 2 bits.
    scale_RB8 = np.concatenate([low & 63, both & 15 | low >> 6 << 4], -1)
    min_RB8 = np.concatenate([high & 63, both >> 4 | high >> 6 << 4], -1)
    q = _halves(blocks_RBC[..., 16:].reshape(*blocks_RBC.shape[:2], 4, 32))
    return _packed(q, _flat_float16(d_RB1 * scale_RB8), _flat_float16(-dmin_RB1 * min_RB8))


def _q8_0(raw_RC: Array) -> dict[str, Array]:
    blocks_RBC = _blocks(raw_RC, 34)
    weight = np.ascontiguousarray(blocks_RBC[..., 2:]).view(np.int8).reshape(len(raw_RC), -1)
    return {"weight": weight, "weight_scale": _float16(blocks_RBC, 0)}


def _q6_k(raw_RC: Array) -> dict[str, Array]:
    blocks_RBC = _blocks(raw_RC, 210)
    shape = blocks_RBC.shape[:2]
    low = blocks_RBC[..., :128].reshape(*shape, 2, 2, 32)
    high = blocks_RBC[..., 128:192].reshape(*shape, 2, 1, 32)
    # 128 elements at a time: low halves of 64 bytes, then high halves; 2 more bits of each.
    nibbles = np.concatenate([low & 15, low >> 4], -2)
    bits = high >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    weight = (nibbles | bits << 4).astype(np.int8) - 32
    scale_RB16 = np.ascontiguousarray(blocks_RBC[..., 192:208]).view(np.int8)
    d_RB1 = _float16(blocks_RBC, 208).astype(np.float32)[..., None]
    return {
        "weight": weight.reshape(len(raw_RC), -1),
        "weight_scale": _flat_float16(d_RB1 * scale_RB16),
    }


_CONVERTERS: dict[str, Callable[[Array], dict[str, Array]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q8_0": _q8_0,
    "Q6_K": _q6_k,
}


def _blocks(raw_RC: Array, size: int) -> Array:
    return raw_RC.reshape(len(raw_RC), -1, size)


def _float16(blocks_RBC: Array, at: int) -> Array:
    return np.ascontiguousarray(blocks_RBC[..., at : at + 2]).view("<f2")[..., 0]


def _flat_float16(values: Array) -> Array:
    with np.errstate(over="ignore"):  # the caller checks that scales are finite
        return values.reshape(len(values), -1).astype(np.float16)


def _halves(bytes: Array) -> Array:
    """Unpack elements of 4 bits: the low ones of all bytes, then the high ones."""
    return np.concatenate([bytes & 15, bytes >> 4], -1)


def _packed(q: Array, scale_RG: Array, minimum_RG: Array | None = None) -> dict[str, Array]:
    """Pack elements of 4 bits in their order, the first one in the low half of a byte."""
    flat = q.reshape(len(q), -1)
    bytes = np.ascontiguousarray(flat[:, ::2] | flat[:, 1::2] << 4)
    tensors = {"weight_packed": bytes.view("<i4"), "weight_scale": scale_RG}
    return tensors if minimum_RG is None else {**tensors, "weight_minimum": minimum_RG}
