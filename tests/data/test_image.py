from __future__ import annotations

import contextlib
import gzip
import struct
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import DataError
from ingot.data import image
from ingot.data.image import digits, mnist, read_idx


def packed(dimensions: list[int], content: bytes, kind: int = 8) -> bytes:
    head = bytes([0, 0, kind, len(dimensions)])
    return head + struct.pack(f">{len(dimensions)}I", *dimensions) + content


@pytest.mark.parametrize("dotted", [False, True])
@pytest.mark.parametrize("zipped", [False, True])
def test_images_and_labels(tmp_path: Path, zipped: bool, dotted: bool) -> None:
    files = {
        "t10k-images-idx3-ubyte": packed([2, 2, 3], bytes(range(0, 240, 20))),
        "t10k-labels-idx1-ubyte": packed([2], bytes([7, 9])),
    }
    for name, content in files.items():
        name = name.replace("-idx", ".idx") if dotted else name
        name, content = (f"{name}.gz", gzip.compress(content)) if zipped else (name, content)
        (tmp_path / name).write_bytes(content)
    found = mnist(tmp_path, "t10k")
    assert found.x.shape == (2, 1, 2, 3)
    assert torch.equal(found.x.flatten(), torch.arange(0, 240, 20) / 255)
    assert found.y.tolist() == [7, 9]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\0\x08",
        b"\0\0\x08\x00",
        b"\0\0\x0d\x01\0\0\0\x01a",
        b"\1\0\x08\x01\0\0\0\x01a",
        b"\0\0\x08\x01\0\0\0",
        packed([2, 2], b"abc"),
        packed([2, 2], b"abcde"),
        packed([0xFFFFFFFF] * 4, b""),
        packed([0, 28], b""),
        packed([1] * 5, b"a"),
        packed([1] * 255, b"a"),
        packed([0xFFFFFFFF], b"a"),
    ],
    ids=lambda content: content[:12].hex() or "empty",
)
@pytest.mark.parametrize("zipped", [False, True])
def test_a_header_that_lies_takes_no_memory(tmp_path: Path, content: bytes, zipped: bool) -> None:
    path = tmp_path / ("images.gz" if zipped else "images")
    path.write_bytes(gzip.compress(content) if zipped else content)
    tracemalloc.start()
    with pytest.raises(DataError, match="cannot be read"):
        read_idx(path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


@given(content=st.binary(max_size=40))
def test_arbitrary_bytes_are_rejected_or_read(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("idx")
    for path, written in (
        (folder / "a.gz", content),
        (folder / "b", b"\0\0\x08" + content),
        (folder / "c.gz", gzip.compress(b"\0\0\x08\x01" + content)[:-3]),
    ):
        path.write_bytes(written)
        with contextlib.suppress(DataError):
            assert read_idx(path).dtype == torch.uint8


def test_a_file_that_decompresses_to_too_much_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "MAX_BYTES", 1000)
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(packed([1001], bytes(1001))))
    with pytest.raises(DataError, match="got 1,001"):
        read_idx(path)


def test_labels_of_another_dataset_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(packed([2, 1, 1], b"ab"))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(packed([3], b"abc"))
    with pytest.raises(DataError, match="must match"):
        mnist(tmp_path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train-images-idx3-ubyte"):
        mnist(tmp_path)


def test_the_digits_are_between_0_and_1_and_of_ten_classes() -> None:
    found = digits()
    assert (float(found.x.min()), float(found.x.max())) == (0.0, 1.0)
    assert sorted(set(found.y.tolist())) == list(range(10))


def test_without_scikit_learn_the_hint_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError) as caught:
        digits()
    assert "ingot[data]" in caught.value.hint
