"""Weights that several processes share: in memory once, mapped read-only by each.

    fd = os.memfd_create("weights", os.MFD_ALLOW_SEALING)
    shared = SharedWeights(fd, directory)       # in each process, with the same file
    shared.load(model, read)

The first process reads the weights of the directory, in whatever layout the model computes with
(q, k and v in one matrix, panels of quantized weights), and moves them to the file tensor by
tensor, so that they are never in memory twice. Then it seals the file: no process can change it any
more. The others map it and read nothing. If the first one dies, the file is not sealed, and the
next one begins again.

The file has a JSON header of fixed size with the name, dtype, shape, strides and offset of each
tensor, and the identity of the directory's files: weights of other files are not used.
"""

# pyright: basic
from __future__ import annotations

import fcntl
import math
import mmap
import os
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec
import torch
from torch import Tensor, nn

ALIGNMENT = 64
HEADER_BYTES = 1 << 22
"""Maximum size of the header; only what is written of it takes memory."""
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the file."""

    module: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    size: int


class _Header(msgspec.Struct, frozen=True):
    """What the file contains, and what it was read from."""

    source: list[tuple[str, int, int]]
    entries: list[_Entry]


class SharedWeights:
    """The file of one model's weights."""

    def __init__(self, fd: int, directory: Path) -> None:
        self._path, self._directory = Path(f"/proc/self/fd/{fd}"), directory

    def load(self, model: nn.Module, read: Callable[[], None]) -> None:
        """Fill a model that is on `meta`; `read` allocates and fills it with the directory's
        weights. Its tensors cannot be written to."""
        source = _identity(self._directory)
        # Opened again: a lock excludes other open files, not other processes with the same one.
        with self._path.open("r+b", buffering=0) as file:
            with _lock(file):
                if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_WRITE:
                    read()
                    _publish(model, file.fileno(), source)
            header = _read_header(file)
            if header.source != source:  # the directory has been changed
                read()
                return
            size = os.fstat(file.fileno()).st_size
            # A sealed file can be mapped as shared from Linux 6.7 on only.
            memory = mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE, mmap.PROT_READ)
        _attach(model, header, memory)


@contextmanager
def _lock(file: IO[bytes]) -> Generator[None]:
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:  # closing would not do: the mapping keeps the file open
        fcntl.flock(file, fcntl.LOCK_UN)


def _publish(model: nn.Module, fd: int, source: list[tuple[str, int, int]]) -> None:
    """Move the tensors of a model to the file, and seal it."""
    at = HEADER_BYTES
    entries: list[_Entry] = []
    for module_name, module, name, tensor in _tensors(model):
        flat = _memory_of(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        place = (tuple(tensor.shape), tensor.stride(), at, flat.numel())
        entries.append(_Entry(module_name, name, dtype, *place))
        _write(fd, flat, at)
        at += -(-flat.numel() // ALIGNMENT) * ALIGNMENT
        _replace(module, name, tensor.to("meta"))
    content = msgspec.json.encode(_Header(source, entries))
    assert len(content) < HEADER_BYTES
    os.ftruncate(fd, at)
    _write(fd, torch.frombuffer(bytearray(content + b"\n"), dtype=torch.uint8), 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def _read_header(file: IO[bytes]) -> _Header:
    content = os.pread(file.fileno(), HEADER_BYTES, 0)
    return msgspec.json.decode(content[: content.index(b"\n")], type=_Header)


def _identity(directory: Path) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of the files that determine the weights."""
    files = sorted([*directory.glob("*.safetensors"), *directory.glob("*.json")])
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


def _tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    for module_name, module in model.named_modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield module_name, module, name, tensor.detach()


def _memory_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor that has no gaps, in the order of its strides."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    flat = tensor.permute(order)
    assert flat.is_contiguous(), "the tensors of a model have no gaps"
    return flat.reshape(-1).view(torch.uint8)


def _write(fd: int, content: Tensor, at: int) -> None:
    view = memoryview(content.numpy())  # pyright: ignore[reportArgumentType]
    while view:
        count = os.pwrite(fd, view, at)
        at, view = at + count, view[count:]


def _attach(model: nn.Module, header: _Header, memory: mmap.mmap) -> None:
    modules = dict(model.named_modules())
    for entry in header.entries:
        dtype = getattr(torch, entry.dtype)
        if entry.size:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                count = entry.size // dtype.itemsize
                flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=entry.begin)
        else:
            flat = torch.empty(0, dtype=dtype)
        tensor = flat.as_strided(entry.shape, entry.strides)
        assert math.prod(entry.shape) == flat.numel()
        _replace(modules[entry.module], entry.name, tensor)
    missing = [name for _, _, name, tensor in _tensors(model) if tensor.is_meta]
    assert not missing, f"not in the shared file: {missing[:4]}"


def _replace(module: nn.Module, name: str, tensor: Tensor) -> None:
    own = module._parameters.get(name)
    if own is not None:
        module._parameters[name] = nn.Parameter(tensor, requires_grad=own.requires_grad)
    else:
        module._buffers[name] = tensor
