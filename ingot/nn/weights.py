"""SafetensorsDir in a directory of safetensors files: one, or shards with an index.

Reading copies nothing twice: the kernel writes a tensor's bytes from the file into the memory of
the parameter, so a process that loads a model is as large as the model. (A
mapping of the file, copied from, would count as the process's own until the kernel needs the room:
twice the model.) The `safetensors` library parses and checks the header; it guarantees that the
tensors fill the file without gaps, so their order and sizes say where each lies.

Nothing in the directory is trusted: a shard is a plain name, not a path; a tensor is in one file;
names, shapes and dtypes are compared with the model's before memory is touched. Files that are
not safetensors (pickles) are never opened.
"""

# pyright: basic
from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from ingot.core.errors import IngotError
from ingot.core.paths import atomic_file, write_atomic

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
READABLE = (torch.float32, torch.bfloat16, torch.float16)

# What a file may hold; what is not readable may lie beside the weights.
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_PIECE = 2**20
_THREADS = min(4, os.cpu_count() or 1)
_AT_ONCE = 1024  # buffers that the kernel takes in one call
_MOST_JSON = 64 * 2**20
_PLAIN = "weights are read in float32, bfloat16 or float16; quantized ones are not"
_REDO = "the file is damaged or was not made as it should be: fetch or export it again"


class WeightsError(IngotError):
    """SafetensorsDir that are missing, damaged, or not those of the model."""


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor is: its file, from which byte on, its dtype there and its shape."""

    file: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsDir:
    """The tensors of a directory, by name; none is in memory.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> write(directory, {"a": torch.tensor([1.0, 2.0])})
    >>> into = torch.empty(2)
    >>> SafetensorsDir(directory).read({"a": into})
    >>> into
    tensor([1., 2.])
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self.entries: dict[str, TensorEntry] = {}
        for name in _files(self.directory):
            path = self.directory / name
            for tensor, entry in _entries(path):
                if tensor in self.entries:
                    where = f"{self.entries[tensor].file.name} and {name}"
                    raise WeightsError(f"'{tensor}' is in {where}", hint=_REDO)
                self.entries[tensor] = entry
        _compare_with_index(self.directory, self.entries)

    def check_matches(self, wanted: Mapping[str, Tensor]) -> None:
        """Require exactly these names with the tensors' shapes; they may be on `meta`."""
        if missing := sorted(wanted.keys() - self.entries.keys()):
            raise WeightsError(
                f"{len(missing)} tensors are not in {self.directory}: {_some(missing)}",
                hint="is config.json that of these weights?",
            )
        if extra := sorted(self.entries.keys() - wanted.keys()):
            raise WeightsError(
                f"{len(extra)} tensors in {self.directory} are not in the model: {_some(extra)}",
                hint="is config.json that of these weights? one that says more is not supported",
            )
        for name, tensor in wanted.items():
            if self.entries[name].dtype not in READABLE:
                raise WeightsError(f"'{name}' is {self.entries[name].dtype}", hint=_PLAIN)
            if self.entries[name].shape != tuple(tensor.shape):
                raise WeightsError(
                    f"'{name}' is {self.entries[name].shape} where the model has "
                    f"{tuple(tensor.shape)}",
                    hint="is config.json that of these weights?",
                )

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill tensors of the same shapes, by threads; converted where the dtype is another.

        Two threads read 0.3 GB in 0.09 s, one in 0.18: most of it is the first touch of memory.
        """
        tasks = [(self.entries[name], tensor.detach()) for name, tensor in into.items()]
        assert all(tuple(tensor.shape) == entry.shape for entry, tensor in tasks)
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(_read, _stretches(tasks)))

    def equal(self, one: str, other: str) -> bool:
        """Whether two tensors are the same, bit for bit."""
        a, b = self.entries[one], self.entries[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        with a.file.open("rb") as left, b.file.open("rb") as right:
            left.seek(a.begin)
            right.seek(b.begin)
            pieces = (min(_PIECE, a.bytes - at) for at in range(0, a.bytes, _PIECE))
            return all(left.read(size) == right.read(size) for size in pieces)


def write(directory: Path | str, tensors: Mapping[str, Tensor], most: int = SHARD_BYTES) -> None:
    """Write the tensors as one file, or as shards of `most` bytes with an index.

    A directory that has weights already is refused, as what would be a mixture of two models for
    whoever reads it meanwhile.
    """
    directory = Path(directory)
    if any(directory.glob("*.safetensors")) or (directory / INDEX).exists():
        raise WeightsError(f"{directory} has weights", hint="give another directory, or empty it")
    shards = _shards(tensors, most)
    if len(shards) == 1:
        _write_file(directory / SINGLE, shards[0])
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_file(directory / name, shard)
        index |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    table = {"metadata": {"total_size": total}, "weight_map": index}
    write_atomic(directory / INDEX, json.dumps(table, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of moderate size."""
    try:
        size = path.stat().st_size
        if size > _MOST_JSON:
            raise WeightsError(f"{path} has {size} bytes", hint=f"at most {_MOST_JSON} are read")
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightsError(
            f"cannot read {path}: {error.strerror}", hint="check the path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not JSON: {error}"[:300], hint=_REDO) from error
    if not isinstance(found, dict):
        raise WeightsError(f"{path} has no object in it", hint=_REDO)
    return found


def _files(directory: Path) -> list[str]:
    if (directory / INDEX).exists():
        return sorted(set(_weight_map(directory).values()))
    if (directory / SINGLE).exists():
        return [SINGLE]
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise WeightsError(
            f"{directory} has its weights as pickles, which can run code and are never opened",
            hint="save them as safetensors: model.save_pretrained(directory) of transformers",
        )
    raise WeightsError(f"no {SINGLE} in {directory}", hint="give the directory of a model")


def _weight_map(directory: Path) -> dict[str, str]:
    table = read_json(directory / INDEX).get("weight_map")
    if not (isinstance(table, dict) and table):
        raise WeightsError(f"{directory / INDEX} has no weight_map", hint=_REDO)
    for file in table.values():
        if not (isinstance(file, str) and re.fullmatch(r"[\w-][\w.-]*\.safetensors", file)):
            raise WeightsError(
                f"{directory / INDEX} names a file '{file}'"[:300],
                hint="shards lie beside their index and are named *.safetensors",
            )
    return table


def _compare_with_index(directory: Path, entries: dict[str, TensorEntry]) -> None:
    if not (directory / INDEX).exists():
        return
    said, found = _weight_map(directory), {name: entry.file.name for name, entry in entries.items()}
    if wrong := sorted(name for name, file in said.items() if found.get(name) != file):
        raise WeightsError(
            f"the index names tensors that are not there: {_some(wrong)}", hint=_REDO
        )
    if extra := sorted(found.keys() - said.keys()):
        raise WeightsError(f"the index leaves out {_some(extra)}", hint=_REDO)


def _entries(path: Path) -> list[tuple[str, TensorEntry]]:
    """What the header of a file says, in the order of the file."""
    try:
        with path.open("rb") as raw, safe_open(path, framework="pt") as file:
            begin = 8 + int.from_bytes(raw.read(8), "little")
            found: list[tuple[str, TensorEntry]] = []
            for name in file.offset_keys():
                header = file.get_slice(name)
                if header.get_dtype() not in _DTYPES:
                    raise WeightsError(f"'{name}' in {path} is {header.get_dtype()}", hint=_PLAIN)
                dtype, shape = _DTYPES[header.get_dtype()], tuple(header.get_shape())
                entry = TensorEntry(path, begin, dtype, shape)
                found.append((name, entry))
                begin += entry.bytes
            size = raw.seek(0, 2)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error}", hint="check the path") from error
    except SafetensorError as error:
        raise WeightsError(f"{path} is not safetensors: {error}", hint=_REDO) from error
    assert begin == size, "safetensors lets no gaps pass"
    return found


def _stretches(
    tasks: list[tuple[TensorEntry, Tensor]],
) -> Iterator[list[tuple[TensorEntry, Tensor]]]:
    """The tensors in the order of their files: as many as follow each other, for each thread its
    share. One that is converted is alone, so that few are in memory twice."""
    share = sum(entry.bytes for entry, _ in tasks) // _THREADS
    stretch: list[tuple[TensorEntry, Tensor]] = []
    for entry, tensor in sorted(tasks, key=lambda task: (task[0].file, task[0].begin)):
        if stretch and not (_follows(entry, stretch[-1][0]) and _fits(entry, tensor)):
            yield stretch
            stretch = []
        stretch.append((entry, tensor))
        size = entry.begin + entry.bytes - stretch[0][0].begin
        if size > share or len(stretch) == _AT_ONCE or not _fits(entry, tensor):
            yield stretch
            stretch = []
    if stretch:
        yield stretch


def _follows(entry: TensorEntry, last: TensorEntry) -> bool:
    return (entry.file, entry.begin) == (last.file, last.begin + last.bytes)


def _fits(entry: TensorEntry, tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.dtype == entry.dtype and tensor.is_cpu


def _read(stretch: list[tuple[TensorEntry, Tensor]]) -> None:
    first, tensor = stretch[0]
    if not _fits(first, tensor):
        buffer = torch.empty(first.shape, dtype=first.dtype)
        _fill([buffer], first)
        with torch.no_grad():
            tensor.copy_(buffer)
    else:
        _fill([tensor for _, tensor in stretch], first)


def _fill(buffers: list[Tensor], first: TensorEntry) -> None:
    """Fill tensors that follow each other in a file."""
    views = [
        memoryview(buffer.view(-1).view(torch.uint8).numpy())  # pyright: ignore[reportArgumentType]
        for buffer in buffers
        if buffer.numel()
    ]
    at = first.begin
    with first.file.open("rb", buffering=0) as file:
        while views:
            count = os.preadv(file.fileno(), views, at)
            if not count:
                raise WeightsError(f"{first.file} ends too early", hint=_REDO)
            at += count
            views = _after(views, count)


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left to fill when so many bytes have been read."""
    left: list[memoryview] = []
    for view in views:
        if count < len(view):
            left.append(view[count:])
        count = max(0, count - len(view))
    return left


def _shards(tensors: Mapping[str, Tensor], most: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    room = most
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = most
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def _write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in ready.items()
    }
    try:
        with atomic_file(path) as temporary:
            serialize_file(specs, temporary, metadata={"format": "pt"})
    except SafetensorError as error:
        raise WeightsError(f"cannot write {path}: {error}", hint="make room there") from error


def _some(names: list[str]) -> str:
    listing = ", ".join(names[:4])[:300]
    return listing if len(names) <= 4 else f"{listing}, ..."
