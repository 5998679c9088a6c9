"""Image datasets: values from 0 to 1 in x_NCHW, classes in y_N.

    digits()       1,797 handwritten digits, 8 x 8, from scikit-learn (ingot[data])
    mnist(folder)  the MNIST digits, 28 x 28, from IDX files, with or without gzip

An IDX file is a big-endian header, followed by bytes:

    0 0 8 d        8 for unsigned bytes, the only supported type; d dimensions
    uint32 x d     the dimensions
    uint8 ...      the values

Legend: N images, C = 1 channel, H rows, W columns.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ingot.core.errors import DataError
from ingot.data.array import ArrayDataset

MAX_BYTES = 1 << 32  # of an uncompressed IDX file
MAX_DIMENSIONS = 4


def digits() -> ArrayDataset:
    """Load the digits of scikit-learn; `split(0.2)` uses 359 for validation.

    >>> digits().x.shape, digits().y.dtype
    (torch.Size([1797, 1, 8, 8]), torch.int64)
    """
    try:
        from sklearn.datasets import load_digits  # pyright: ignore
    except ModuleNotFoundError as error:
        raise DataError(
            "the digits dataset needs scikit-learn, which is not installed",
            hint="pip install 'ingot[data]'",
        ) from error
    loaded: Any = load_digits()  # pyright: ignore
    x_NCHW = torch.tensor(loaded.images, dtype=torch.float32)[:, None] / 16
    return ArrayDataset(x_NCHW, torch.tensor(loaded.target, dtype=torch.int64))


def mnist(folder: Path, split: str = "train") -> ArrayDataset:
    """Load MNIST, or a dataset in its format; `split` is "train" or "t10k", a prefix of files."""
    images, labels = (
        read_idx(_find_file(folder, f"{split}-{name}"))
        for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        raise DataError(
            f"{folder}: images and labels must match, got shapes {tuple(images.shape)} and "
            f"{tuple(labels.shape)}",
            hint="use the two files of the same dataset",
        )
    return ArrayDataset(images[:, None].float() / 255, labels.long())


def read_idx(path: Path) -> Tensor:
    """Read an IDX file as a tensor of its shape."""
    try:
        with _open(path) as file:
            header = file.read(4)
            if len(header) < 4 or header[:3] != b"\0\0\x08" or not 0 < header[3] <= MAX_DIMENSIONS:
                raise _read_error(path, f"not an IDX header: {header.hex(' ')}")
            dimensions = np.frombuffer(_read_bytes(file, 4 * header[3], path), ">u4").tolist()
            size = math.prod(dimensions)
            if not 0 < size <= MAX_BYTES:
                raise _read_error(path, f"size must be from 1 to {MAX_BYTES:,} bytes, got {size:,}")
            content = _read_bytes(file, size, path)
            if file.read(1):
                raise _read_error(path, "longer than its header says")
    except (OSError, EOFError, zlib.error) as error:
        raise _read_error(path, str(error)) from error
    return torch.frombuffer(content, dtype=torch.uint8).view(dimensions)


def _read_bytes(file: Any, size: int, path: Path) -> bytearray:
    """Read `size` bytes; memory is allocated as they arrive, since the header may be wrong."""
    content = bytearray()
    while len(content) < size:
        chunk = file.read(min(1 << 20, size - len(content)))
        if not chunk:
            raise _read_error(path, f"{size - len(content):,} bytes are missing")
        content += chunk
    return content


def _open(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _find_file(folder: Path, name: str) -> Path:
    # Both spellings are in use: train-images-idx3-ubyte, train-images.idx3-ubyte.
    names = [name, name.replace("-idx", ".idx")]
    for path in [folder / f"{n}{suffix}" for n in names for suffix in ("", ".gz")]:
        if path.is_file():
            return path
    raise DataError(
        f"{folder}: {name} not found", hint="download the files of MNIST to this directory"
    )


def _read_error(path: Path, reason: str) -> DataError:
    return DataError(f"{path}: cannot be read: {reason}", hint="download the file again")
