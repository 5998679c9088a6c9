"""Write the tensors of a GGUF file as safetensors.

A tensor is written in bfloat16, or, if it has a format, as the quantized weight that it is: see
`ingot.interop.gguf_blocks`.

**RoPE channels.** llama.cpp rotates neighbouring channels (2i, 2i+1) of a Llama head, Hugging Face
the halves (i, i + H/2). llama.cpp's converter therefore interleaves the rows of q and k; here they
are deinterleaved again. Qwen is rotated by halves in both and needs no reordering.

**Memory** is bounded by a few chunks of rows, independent of the size of the model: rows are read,
converted and written before the next ones are read, for the scales of a weight a second time. The
file is not memory-mapped, because truncating a mapped file kills the process.

Legend: R rows, C columns.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ingot.core.log import Progress
from ingot.interop import gguf_file
from ingot.interop.compressed_tensors import tensor_shapes
from ingot.interop.gguf_blocks import convert_rows
from ingot.interop.gguf_file import GgufError, GgufFile, GgufTensor, damaged_error
from ingot.nn.formats import WeightFormat

Array = npt.NDArray[Any]

SHARD_BYTES = 2_000_000_000
CHUNK_ELEMENTS = 1 << 20
MAX_MAGNITUDE = 3.38e38  # just below the largest bfloat16

_BFLOAT16 = "BF16"
_FLOAT16 = "F16"
_DTYPES = {torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", None: _FLOAT16}
_ITEM_BYTES = {"I64": 8, "I32": 4, "I8": 1, _BFLOAT16: 2, _FLOAT16: 2}


class Part(NamedTuple):
    """A tensor of the directory; `suffix` names one of several that are a quantized weight."""

    name: str
    suffix: str | None
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class TargetTensor:
    """A weight of the directory and its source.

    With a `format` it is quantized. Rows are interleaved if there is a `rope_head_dim`.
    """

    name: str
    source: GgufTensor
    rope_head_dim: int | None = None
    format: WeightFormat | None = None

    @property
    def parts(self) -> list[Part]:
        """The tensors that are written."""
        if self.format is None:
            return [Part(self.name, None, _BFLOAT16, self.source.shape)]
        rows, channels = self.source.shape
        layer = self.name.removesuffix(".weight")
        return [
            Part(f"{layer}.{suffix}", suffix, _DTYPES[dtype], shape)
            for suffix, (shape, dtype) in tensor_shapes(self.format, rows, channels).items()
        ]

    @property
    def num_bytes(self) -> int:
        """Size of the tensors that are written."""
        return sum(part.num_bytes for part in self.parts)


def write_weights(
    file: GgufFile, targets: list[TargetTensor], directory: Path, progress: Progress | None
) -> None:
    """Write the tensors as one file, or as shards with an index."""
    shards = list(_shards(targets))
    weight_map: dict[str, str] = {}
    if progress:
        progress.describe("converting")
        progress.advance(file.num_bytes - sum(target.source.num_bytes for target in targets))
    for number, shard in enumerate(shards, start=1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (directory / name).open("xb") as out, file.path.open("rb") as stream:
            _write_shard(file, stream, shard, out, progress)
        weight_map |= {part.name: name for target in shard for part in target.parts}
    if len(shards) > 1:
        total = sum(target.num_bytes for target in targets)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _shards(targets: list[TargetTensor]) -> Iterator[list[TargetTensor]]:
    shard: list[TargetTensor] = []
    size = 0
    for target in targets:
        if shard and size + target.num_bytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(target)
        size += target.num_bytes
    yield shard


def _write_shard(
    file: GgufFile,
    stream: BinaryIO,
    shard: list[TargetTensor],
    out: BinaryIO,
    progress: Progress | None,
) -> None:
    """Write a safetensors file: the length of the header, the header, then the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for part in (part for target in shard for part in target.parts):
        span = [position, position + part.num_bytes]
        header[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": span}
        position = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8
    out.write(struct.pack("<Q", len(text)) + text)
    for target in shard:
        for number, part in enumerate(target.parts):
            for array in _arrays(file, stream, target, part, progress if number == 0 else None):
                out.write(array.data)


def _arrays(
    file: GgufFile,
    stream: BinaryIO,
    target: TargetTensor,
    part: Part,
    progress: Progress | None,
) -> Iterator[Array]:
    """Yield the values of a tensor of the directory, chunk by chunk."""
    if part.suffix == "weight_shape":
        yield np.array(target.source.shape, "<i8")
        return
    for raw_RC in _chunks(file, stream, target):
        if part.suffix is None:
            values_RC = dequantize(raw_RC, target.source)
            if not np.abs(values_RC).max() < MAX_MAGNITUDE:  # false for NaN, too
                raise damaged_error(file.path, f"'{target.source.name}' has non-finite values")
            yield to_bfloat16_bits(values_RC)
        else:
            array = convert_rows(target.source.type, raw_RC)[part.suffix]
            if array.dtype == np.float16 and not np.isfinite(array).all():
                raise GgufError(
                    f"{file.path.name}: a scale of '{target.source.name}' exceeds float16",
                    hint="import the model with --dequantize, or download it again",
                )
            yield np.ascontiguousarray(array)
        if progress:
            progress.advance(raw_RC.nbytes)


def _chunks(file: GgufFile, stream: BinaryIO, target: TargetTensor) -> Iterator[Array]:
    """Yield chunks of rows as they are stored, in Hugging Face's order."""
    tensor, unit = target.source, target.rope_head_dim or 1
    num_rows = math.prod(tensor.shape[:-1])
    step = max(1, CHUNK_ELEMENTS // (tensor.shape[-1] * unit)) * unit
    for first in range(0, num_rows, step):
        raw_RC = read_rows(file, stream, tensor, first, min(step, num_rows - first))
        yield (
            raw_RC
            if target.rope_head_dim is None
            else deinterleave_pairs(raw_RC, target.rope_head_dim)
        )


def deinterleave_pairs(rows_RC: Array, head: int) -> Array:
    """Reorder the rows of each head from interleaved pairs to two halves.

    >>> deinterleave_pairs(np.arange(8).reshape(8, 1), 4).ravel()
    array([0, 2, 1, 3, 4, 6, 5, 7])
    """
    pairs = rows_RC.reshape(-1, head // 2, 2, rows_RC.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows_RC.shape)


def to_bfloat16_bits(values: Array) -> Array:
    """Round finite float32 values to bfloat16 (to nearest even) and return the bits.

    In NumPy rather than torch, whose threads wait for each other on a busy machine.

    >>> [hex(bits) for bits in to_bfloat16_bits(np.float32([1.0, 1.00390625, 1.01171875]))]
    ['0x3f80', '0x3f80', '0x3f82']
    """
    bits = values.view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16).astype(np.uint16)


def read_rows(
    file: GgufFile, stream: BinaryIO, tensor: GgufTensor, first: int, count: int
) -> Array:
    """Read rows as they are stored, (R, bytes)."""
    stream.seek(tensor.start + first * tensor.row_bytes)
    content = stream.read(count * tensor.row_bytes)
    if len(content) != count * tensor.row_bytes:
        raise damaged_error(file.path, "it was truncated while being read")
    return np.frombuffer(content, np.uint8).reshape(count, tensor.row_bytes)


def dequantize(raw_RC: Array, tensor: GgufTensor) -> Array:
    """Return the values of rows, (R, C), in float32."""
    quants, constants = gguf_file.package("quants"), gguf_file.package("constants")
    kind = constants.GGMLQuantizationType[tensor.type]
    # As one row: the package processes many rows 16 at a time.
    with np.errstate(all="ignore"):  # overflowing scales are caught by the check of the result
        values: Array = quants.dequantize(raw_RC.reshape(1, -1), kind)
    return values.reshape(len(raw_RC), -1)
