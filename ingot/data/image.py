"""Images as arrays: values from 0 to 1 in x_NCHW, the class of each in y_N.

    digits()       1,797 handwritten digits, 8 x 8, which come with scikit-learn (ingot[data])
    mnist(folder)  the MNIST digits, 28 x 28, from its IDX files, packed by gzip or not

An IDX file is a header of big-endian numbers and then bytes:

    0 0 8 d        8 says unsigned bytes, the only type here; d dimensions
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

MAX_BYTES = 1 << 32  # of an IDX file, unpacked
MAX_DIMENSIONS = 4


def digits() -> ArrayDataset:
    """The digits of scikit-learn, of which `split(0.2)` holds out 359.

    >>> digits().x.shape, digits().y.dtype
    (torch.Size([1797, 1, 8, 8]), torch.int64)
    """
    try:
        from sklearn.datasets import load_digits  # pyright: ignore
    except ModuleNotFoundError as error:
        raise DataError(
            "the digits come with scikit-learn, which is not installed",
            hint="pip install 'ingot[data]'",
        ) from error
    found: Any = load_digits()  # pyright: ignore
    x_NCHW = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    return ArrayDataset(x_NCHW, torch.tensor(found.target, dtype=torch.int64))


def mnist(folder: Path, part: str = "train") -> ArrayDataset:
    """MNIST, or what has its form; `part` is how its files begin: "train" or "t10k"."""
    images, labels = (
        read_idx(_found(folder, f"{part}-{name}"))
        for name in ("images-idx3-ubyte", "labels-idx1-ubyte")
    )
    if images.dim() != 3 or labels.dim() != 1 or len(images) != len(labels):
        raise DataError(
            f"the images in {folder} are {tuple(images.shape)}, their labels {tuple(labels.shape)}",
            hint="take both files from the same set",
        )
    return ArrayDataset(images[:, None].float() / 255, labels.long())


def read_idx(path: Path) -> Tensor:
    """The bytes of an IDX file, in its shape."""
    try:
        with _opened(path) as file:
            head = file.read(4)
            if len(head) < 4 or head[:3] != b"\0\0\x08" or not 0 < head[3] <= MAX_DIMENSIONS:
                raise _broken(path, f"it begins with {head.hex(' ')}")
            dimensions = np.frombuffer(_exactly(file, 4 * head[3], path), ">u4").tolist()
            size = math.prod(dimensions)
            if not 0 < size <= MAX_BYTES:
                raise _broken(path, f"it claims {size:,} bytes")
            content = _exactly(file, size, path)
            if file.read(1):
                raise _broken(path, "there is more in it than it says")
    except (OSError, EOFError, zlib.error) as error:
        raise _broken(path, str(error)) from error
    return torch.frombuffer(content, dtype=torch.uint8).view(dimensions)


def _exactly(file: Any, size: int, path: Path) -> bytearray:
    """So many bytes; memory is taken as they come, and not because a header says so."""
    content = bytearray()
    while len(content) < size:
        chunk = file.read(min(1 << 20, size - len(content)))
        if not chunk:
            raise _broken(path, f"it ends {size - len(content):,} bytes too early")
        content += chunk
    return content


def _opened(path: Path) -> Any:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _found(folder: Path, name: str) -> Path:
    # The files are found under either name: train-images-idx3-ubyte, train-images.idx3-ubyte.
    names = [name, name.replace("-idx", ".idx")]
    for path in [folder / f"{n}{suffix}" for n in names for suffix in ("", ".gz")]:
        if path.is_file():
            return path
    raise DataError(f"{folder}: {name} not found", hint="put the files of MNIST there")


def _broken(path: Path, why: str) -> DataError:
    return DataError(f"cannot read {path}: {why}", hint="download the file again")
