"""Weights in a directory of safetensors files: one file, or shards with an index.

Reading makes no intermediate copy: `preadv` writes the bytes of a tensor from the file into the
memory of the parameter, so a process that loads a model is as large as the model. (Copying from a
memory-mapped file would count twice towards its resident set.) The `safetensors` library parses and
checks the header; it guarantees that the tensors fill the file without gaps, so their order and
sizes determine their offsets.

Nothing in the directory is trusted: a shard is a plain file name, not a path; a tensor is in one
file; names, shapes and dtypes are compared with the model's before memory is allocated. Files that
are not safetensors (pickles) are never opened.
"""

# pyright: basic
from __future__ import annotations

import hashlib
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

# Dtypes that a file may contain; those not in READABLE are allowed for tensors that are not loaded.
_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
_COMPARE_BYTES = 2**20
_THREADS = min(4, os.cpu_count() or 1)
_MAX_BUFFERS = 1024  # of one preadv call (IOV_MAX)
_MAX_JSON_BYTES = 64 * 2**20
_READABLE_HINT = "convert the weights to float32, bfloat16 or float16"
_REFETCH_HINT = "the file is damaged or malformed: download or export it again"


StoredTensor = tuple[tuple[int, ...], torch.dtype | None]
"""Shape and dtype of a tensor in a file; None is any of READABLE."""


class WeightsError(IngotError):
    """Weights that are missing, damaged, or do not match the model."""


@dataclass(frozen=True)
class TensorEntry:
    """Location of a tensor: its file, the offset of its first byte, its dtype and shape."""

    file: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsDir:
    """The tensors of a directory by name, without their data.

    >>> import tempfile
    >>> directory = Path(tempfile.mkdtemp())
    >>> write(directory, {"a": torch.tensor([1.0, 2.0])})
    >>> into = torch.empty(2)
    >>> SafetensorsDir(directory).read({"a": into})
    >>> into
    tensor([1., 2.])
    """

    def __init__(self, directory: Path | str, file: str | None = None) -> None:
        """Read the headers of the model's weights, or those of one other `file`."""
        self.directory = Path(directory)
        self.entries: dict[str, TensorEntry] = {}
        for name in _files(self.directory) if file is None else [file]:
            path = self.directory / name
            for tensor, entry in _entries(path):
                if tensor in self.entries:
                    where = f"{self.entries[tensor].file.name} and {name}"
                    raise WeightsError(
                        f"duplicate tensor '{tensor}' in {where}", hint=_REFETCH_HINT
                    )
                self.entries[tensor] = entry
        if file is None:
            _compare_with_index(self.directory, self.entries)

    def check_matches(
        self, wanted: Mapping[str, Tensor], stored: Mapping[str, StoredTensor] | None = None
    ) -> None:
        """Raise unless the directory has these names and shapes, and no other; `meta` will do.

        `stored` are other tensors, which have to have their dtype, or a floating one for None.
        """
        stored = stored or {}
        names = wanted.keys() | stored.keys()
        if missing := sorted(names - self.entries.keys()):
            raise WeightsError(
                f"{len(missing)} tensors are not in {self.directory}: {_abbreviate(missing)}",
                hint="check that config.json belongs to these weights",
            )
        if extra := sorted(self.entries.keys() - names):
            raise WeightsError(
                f"{len(extra)} tensors in {self.directory} are not in the model: "
                f"{_abbreviate(extra)}",
                hint="check that config.json belongs to these weights; extra tensors are not "
                "supported",
            )
        floats: dict[str, StoredTensor] = {n: (tuple(t.shape), None) for n, t in wanted.items()}
        for name, (shape, dtype) in (floats | dict(stored)).items():
            entry = self.entries[name]
            if dtype is None and entry.dtype not in READABLE:
                raise WeightsError(f"'{name}' is {entry.dtype}", hint=_READABLE_HINT)
            if dtype is not None and entry.dtype != dtype:
                raise WeightsError(
                    f"'{name}' is {entry.dtype} where its format has {dtype}",
                    hint="check that quantization_config in config.json belongs to these weights",
                )
            if entry.shape != shape:
                raise WeightsError(
                    f"'{name}' is {entry.shape} where the model has {shape}",
                    hint="check that config.json belongs to these weights",
                )

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Read into tensors of the same shapes, in threads; convert where the dtype differs.

        Two threads read 0.3 GB in 0.09 s, one in 0.18: most of it is page faults.
        """
        tasks = [(self.entries[name], tensor.detach()) for name, tensor in into.items()]
        assert all(tuple(tensor.shape) == entry.shape for entry, tensor in tasks)
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(_read, _contiguous_runs(tasks)))

    def equal(self, one: str, other: str) -> bool:
        """Return whether two tensors are bitwise equal."""
        a, b = self.entries[one], self.entries[other]
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        with a.file.open("rb") as left, b.file.open("rb") as right:
            left.seek(a.begin)
            right.seek(b.begin)
            starts = range(0, a.bytes, _COMPARE_BYTES)
            sizes = (min(_COMPARE_BYTES, a.bytes - start) for start in starts)
            return all(left.read(size) == right.read(size) for size in sizes)


def write(
    directory: Path | str, tensors: Mapping[str, Tensor], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the tensors as one file, or as shards of at most `shard_bytes` with an index.

    A directory that already has weights is an error: a concurrent reader would see a mixture of two
    models.
    """
    directory = Path(directory)
    if any(directory.glob("*.safetensors")) or (directory / INDEX).exists():
        raise WeightsError(
            f"{directory} already has weights", hint="give another directory, or empty it"
        )
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        write_file(directory / SINGLE, shards[0])
        return
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(directory / name, shard)
        index |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    table = {"metadata": {"total_size": total}, "weight_map": index}
    write_atomic(directory / INDEX, json.dumps(table, indent=2, sort_keys=True) + "\n")


def hash_tensors(tensors: Mapping[str, Tensor], *facts: object) -> str:
    """Return the SHA-256 of tensors by name, and of facts by their `repr`.

    >>> one = {"weight": torch.ones(2)}
    >>> hash_tensors(one) == hash_tensors(one, "bf16")
    False
    """
    digest = hashlib.sha256(repr(facts).encode())
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file of at most 64 MiB."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise WeightsError(
                f"{path}: JSON must have at most {_MAX_JSON_BYTES} bytes, got {size}",
                hint=_REFETCH_HINT,
            )
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise WeightsError(
            f"cannot read {path}: {error.strerror}", hint="check the path"
        ) from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not JSON: {error}"[:300], hint=_REFETCH_HINT) from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} is not a JSON object", hint=_REFETCH_HINT)
    return content


def _files(directory: Path) -> list[str]:
    if (directory / INDEX).exists():
        return sorted(set(_weight_map(directory).values()))
    if (directory / SINGLE).exists():
        return [SINGLE]
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise WeightsError(
            f"{directory} has its weights as pickles, which can run code and are not opened",
            hint="save them as safetensors with transformers: model.save_pretrained(directory)",
        )
    raise WeightsError(f"no {SINGLE} in {directory}", hint="give a model directory")


def _weight_map(directory: Path) -> dict[str, str]:
    table = read_json(directory / INDEX).get("weight_map")
    if not (isinstance(table, dict) and table):
        raise WeightsError(f"{directory / INDEX} has no weight_map", hint=_REFETCH_HINT)
    for file in table.values():
        if not (isinstance(file, str) and re.fullmatch(r"[\w-][\w.-]*\.safetensors", file)):
            raise WeightsError(
                f"{directory / INDEX}: invalid shard name '{file}'"[:300],
                hint="put the shards next to their index, named *.safetensors",
            )
    return table


def _compare_with_index(directory: Path, entries: dict[str, TensorEntry]) -> None:
    if not (directory / INDEX).exists():
        return
    listed, present = (
        _weight_map(directory),
        {name: entry.file.name for name, entry in entries.items()},
    )
    if missing := sorted(name for name, file in listed.items() if present.get(name) != file):
        raise WeightsError(
            f"{directory / INDEX} lists tensors that are missing: {_abbreviate(missing)}",
            hint=_REFETCH_HINT,
        )
    if extra := sorted(present.keys() - listed.keys()):
        raise WeightsError(
            f"{directory / INDEX} does not list {_abbreviate(extra)}", hint=_REFETCH_HINT
        )


def _entries(path: Path) -> list[tuple[str, TensorEntry]]:
    """Read the entries of a file from its header, in the order of the file."""
    try:
        with path.open("rb") as raw, safe_open(path, framework="pt") as file:
            begin = 8 + int.from_bytes(raw.read(8), "little")
            entries: list[tuple[str, TensorEntry]] = []
            for name in file.offset_keys():
                header = file.get_slice(name)
                if header.get_dtype() not in _DTYPES:
                    raise WeightsError(
                        f"'{name}' in {path} is {header.get_dtype()}", hint=_READABLE_HINT
                    )
                dtype, shape = _DTYPES[header.get_dtype()], tuple(header.get_shape())
                entry = TensorEntry(path, begin, dtype, shape)
                entries.append((name, entry))
                begin += entry.bytes
            size = raw.seek(0, 2)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error}", hint="check the path") from error
    except SafetensorError as error:
        raise WeightsError(f"{path} is not safetensors: {error}", hint=_REFETCH_HINT) from error
    assert begin == size, "safetensors allows no gaps"
    return entries


def _contiguous_runs(
    tasks: list[tuple[TensorEntry, Tensor]],
) -> Iterator[list[tuple[TensorEntry, Tensor]]]:
    """Group tensors that are contiguous in a file, into about one run per thread.

    A tensor that needs conversion is a run of its own, so that few are in memory twice.
    """
    share = sum(entry.bytes for entry, _ in tasks) // _THREADS
    run: list[tuple[TensorEntry, Tensor]] = []
    for entry, tensor in sorted(tasks, key=lambda task: (task[0].file, task[0].begin)):
        if run and not (_follows(entry, run[-1][0]) and _reads_directly(entry, tensor)):
            yield run
            run = []
        run.append((entry, tensor))
        size = entry.begin + entry.bytes - run[0][0].begin
        if size > share or len(run) == _MAX_BUFFERS or not _reads_directly(entry, tensor):
            yield run
            run = []
    if run:
        yield run


def _follows(entry: TensorEntry, last: TensorEntry) -> bool:
    return (entry.file, entry.begin) == (last.file, last.begin + last.bytes)


def _reads_directly(entry: TensorEntry, tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.dtype == entry.dtype and tensor.is_cpu


def _read(run: list[tuple[TensorEntry, Tensor]]) -> None:
    first, tensor = run[0]
    if not _reads_directly(first, tensor):
        buffer = torch.empty(first.shape, dtype=first.dtype)
        _fill([buffer], first)
        with torch.no_grad():
            tensor.copy_(buffer)
    else:
        _fill([tensor for _, tensor in run], first)


def _fill(buffers: list[Tensor], first: TensorEntry) -> None:
    """Fill tensors that are contiguous in a file."""
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
                raise WeightsError(f"{first.file} is truncated", hint=_REFETCH_HINT)
            at += count
            views = _remaining(views, count)


def _remaining(views: list[memoryview], count: int) -> list[memoryview]:
    """Return the rest of the buffers after `count` bytes have been read."""
    left: list[memoryview] = []
    for view in views:
        if count < len(view):
            left.append(view[count:])
        count = max(0, count - len(view))
    return left


def _shards(tensors: Mapping[str, Tensor], max_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    free = max_bytes
    for name, tensor in tensors.items():
        if shards[-1] and tensor.nbytes > free:
            shards.append({})
            free = max_bytes
        shards[-1][name] = tensor
        free -= tensor.nbytes
    return shards


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors as one file; it replaces another of this name when it is complete."""
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
        raise WeightsError(
            f"cannot write {path}: {error}", hint="check permissions and free space"
        ) from error


def _abbreviate(names: list[str]) -> str:
    listing = ", ".join(names[:4])[:300]
    return listing if len(names) <= 4 else f"{listing}, ..."
