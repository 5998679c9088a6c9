"""Read the header of a GGUF file without trusting it.

A GGUF file is a header and, after it, the data of the tensors:

    "GGUF" version:u32 num_tensors:u64 num_keys:u64
    num_keys x (key:string type:u32 value)          string: length:u64 bytes
    num_tensors x (name:string num_dims:u32 dims:u64... type:u32 offset:u64)
    padding to `general.alignment`, then the data; offsets count from here

Integers are little-endian; dims are ordered from the fastest to the slowest and are reversed here
to match PyTorch's shapes.

The reader of the `gguf` package is not used: it trusts every count and length in the file, so a
file of 24 bytes makes it loop 2**64 times or read past the end, and it takes 3.5 s for the
vocabulary of SmolLM2 (this module: 0.2 s). The package provides the block formats and the
dequantization.
"""

from __future__ import annotations

import importlib
import math
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from ingot.core.errors import IngotError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER = 256 << 20  # bytes; the largest vocabularies take about 20 MB
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_ELEMENTS = 1 << 22  # of all arrays together; a vocabulary of 256k has about 1.3 million
MAX_NAME = 1024
MAX_ALIGNMENT = 1 << 20
MAX_ELEMENTS_OF_TENSOR = 1 << 40

SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
STRING, ARRAY = 8, 9

Value = bool | int | float | str | list[Any]


class GgufError(IngotError):
    """A GGUF file that is damaged, malformed or not supported."""


@dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """Location of a tensor: `num_bytes` from `start`, in rows of `row_bytes`."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    num_bytes: int
    row_bytes: int


@dataclass(frozen=True, kw_only=True)
class GgufFile:
    """A file with a checked header: every tensor lies within the file."""

    path: Path
    num_bytes: int
    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Return a metadata value; raise if it is not of type `kind`."""
        value = self.metadata.get(key, default)
        if value is default:
            return value
        allowed = (int, float) if kind is float else kind
        if not isinstance(value, allowed) or (isinstance(value, bool) and kind is not bool):
            raise damaged_error(self.path, f"its key '{key}' is not of type {kind.__name__}")
        return value

    def require(self, key: str, kind: type) -> Any:
        """Return a metadata value; raise if it is missing."""
        if key not in self.metadata:
            raise damaged_error(self.path, f"its key '{key}' is missing")
        return self.get(key, kind)


def damaged_error(path: Path, why: str) -> GgufError:
    """Return the error for a damaged or malformed file."""
    return GgufError(
        f"{path.name} is not a valid GGUF file: {why}",
        hint="download or convert it again, and compare its checksum with its publisher's",
    )


def read(path: Path) -> GgufFile:
    """Read and check the header of the file at `path`."""
    try:
        with path.open("rb") as file:
            return _Header(path, file).read()
    except OSError as error:
        raise GgufError(
            f"cannot read {path}: {error.strerror or error}", hint="check the path"
        ) from error


class _Header:
    """Reads the header sequentially; allocates nothing that exceeds the size of the file."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = os.fstat(file.fileno()).st_size
        self.position = 0
        self.elements = 0

    def read(self) -> GgufFile:
        if self.size < 24 or self.take(4) != MAGIC:
            self.fail("it does not begin with 'GGUF'")
        version = self.scalar("<I")
        if version not in VERSIONS:
            big = version & 0xFFFF == 0
            self.fail("it is big-endian" if big else f"it has version {version}, not 2 or 3")
        num_tensors, num_keys = self.scalar("<Q"), self.scalar("<Q")
        self.bound(num_tensors, MAX_TENSORS, "tensors")
        self.bound(num_keys, MAX_KEYS, "keys")
        metadata = dict(self.unique(self.key() for _ in range(num_keys)))
        infos = dict(self.unique(self.info() for _ in range(num_tensors)))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT:
            self.fail(f"its alignment is {alignment}")
        data = -(-self.position // alignment) * alignment
        tensors = {name: self.tensor(name, data, *info) for name, info in infos.items()}
        # Overlapping tensors could make a small file produce unbounded output.
        if sum(tensor.num_bytes for tensor in tensors.values()) > self.size:
            self.fail("its tensors overlap")
        return GgufFile(path=self.path, num_bytes=self.size, metadata=metadata, tensors=tensors)

    def key(self) -> tuple[str, Value]:
        name = self.string(MAX_NAME)
        return name, self.value(self.scalar("<I"))

    def value(self, kind: int) -> Value:
        if kind == STRING:
            return self.string(MAX_HEADER)
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            self.fail(f"it has a value of unknown type {kind}")
        return self.scalar(SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        self.elements += count
        self.bound(self.elements, MAX_ELEMENTS, "elements of arrays")
        if kind == STRING:
            return [self.string(MAX_HEADER) for _ in range(count)]
        if kind not in SCALARS:
            self.fail(f"it has an array of unsupported type {kind}")
        form = SCALARS[kind]
        content = self.take(count * struct.calcsize(form))
        return list(struct.unpack(f"<{count}{form[1]}", content))

    def info(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = self.string(MAX_NAME)
        num_dims = self.scalar("<I")
        if not 1 <= num_dims <= 4:
            self.fail(f"its tensor '{name}' has {num_dims} dimensions")
        shape = tuple(self.scalar("<Q") for _ in range(num_dims))[::-1]
        if min(shape) < 1 or math.prod(shape) > MAX_ELEMENTS_OF_TENSOR:
            self.fail(f"its tensor '{name}' has the shape {shape}")
        return name, (shape, self.scalar("<I"), self.scalar("<Q"))

    def tensor(
        self, name: str, data: int, shape: tuple[int, ...], kind: int, offset: int
    ) -> GgufTensor:
        types, sizes = _formats()
        if kind not in types:
            self.fail(f"its tensor '{name}' has the unknown type {kind}")
        elements, block_bytes = sizes[types[kind]]
        if shape[-1] % elements:
            self.fail(f"the row size of its tensor '{name}' is not a multiple of {elements}")
        row_bytes = shape[-1] // elements * block_bytes
        num_bytes = math.prod(shape[:-1]) * row_bytes
        if data + offset + num_bytes > self.size:
            self.fail(
                f"its tensor '{name}' ends at byte {data + offset + num_bytes:,}, the file at "
                f"{self.size:,}"
            )
        return GgufTensor(
            name=name,
            shape=shape,
            type=types[kind],
            start=data + offset,
            num_bytes=num_bytes,
            row_bytes=row_bytes,
        )

    def unique(self, pairs: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for name, value in pairs:
            if name in seen:
                self.fail(f"'{name}' is a duplicate")
            seen.add(name)
            yield name, value

    def string(self, limit: int) -> str:
        length = self.scalar("<Q")
        if length > limit:
            self.fail(f"it has a name or string of {length:,} bytes")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            self.fail("it has a string that is not UTF-8")

    def scalar(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def take(self, count: int) -> bytes:
        if self.position + count > self.size:
            self.fail(f"it ends at byte {self.size:,}, within its header")
        if self.position + count > MAX_HEADER:
            self.fail(f"its header is larger than {MAX_HEADER:,} bytes")
        content = self.file.read(count)
        if len(content) != count:
            self.fail("it was truncated while being read")
        self.position += count
        return content

    def bound(self, count: int, limit: int, what: str) -> None:
        if count > limit:
            self.fail(f"it claims to have {count:,} {what}")

    def fail(self, why: str) -> NoReturn:
        raise damaged_error(self.path, why)


@cache
def _formats() -> tuple[dict[int, str], dict[str, tuple[int, int]]]:
    """Return type names by number, and (elements, bytes) of a block by type name."""
    constants = package("constants")
    sizes: dict[Any, tuple[int, int]] = constants.GGML_QUANT_SIZES
    return (
        {int(kind): kind.name for kind in sizes},
        {kind.name: size for kind, size in sizes.items()},
    )


def package(part: str) -> Any:
    """Import a module of the `gguf` package."""
    try:
        return importlib.import_module(f"gguf.{part}")
    except ImportError as error:
        raise IngotError(
            f"the package `gguf` is needed to read GGUF files: {error}",
            hint="pip install 'ingot[gguf]'",
        ) from error
