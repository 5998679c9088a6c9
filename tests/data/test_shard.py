from __future__ import annotations

import errno
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import DataError
from ingot.data.shard import Shard, write
from tests.data.token_files import DOCUMENTS, SIZE, tokens


@given(documents=DOCUMENTS, per_shard=st.integers(1, 5), data=st.data())
def test_a_shard_is_read_back(
    documents: list[list[int]], per_shard: int, data: st.DataObject
) -> None:
    flat = [token for document in documents for token in document]
    ends = list(accumulate(map(len, documents)))
    start = data.draw(st.integers(0, len(flat) - 1))
    stop = data.draw(st.integers(start + 1, len(flat)))
    with tempfile.TemporaryDirectory() as directory:
        stream = tokens(Path(directory), documents, per_shard)
        assert (len(stream), stream.documents) == (len(flat), len(documents))
        found, found_ends = stream.read(start, stop)
    assert found.tolist() == flat[start:stop]
    assert found_ends.tolist() == [end - start for end in ends if start < end <= stop]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_either_width_of_tokens(tmp_path: Path, itemsize: int) -> None:
    largest = 256**itemsize - 1 if itemsize == 2 else 2**31 - 1
    path = tmp_path / "shard"
    facts = write(path, [np.array([0, largest])], itemsize)
    found, _ = Shard(path, facts, itemsize, largest + 1).read(0, 2)
    assert found.tolist() == [0, largest]
    with pytest.raises(DataError, match="out of bounds"):
        Shard(path, facts, itemsize, largest).read(0, 1)


@given(documents=DOCUMENTS, data=st.data())
def test_a_changed_byte_is_found_out(documents: list[list[int]], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        stream = tokens(Path(directory), documents, len(documents))
        path = stream.shards[0].path
        content = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(content)
        with pytest.raises(DataError, match="hash does not match"):
            stream.read(0, 1)


@given(documents=DOCUMENTS, data=st.data())
def test_another_length_is_found_out_before_anything_is_read(
    documents: list[list[int]], data: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        shard = tokens(Path(directory), documents, len(documents)).shards[0]
        content = shard.path.read_bytes()
        length = data.draw(st.integers(0, len(content) + 9).filter(lambda n: n != len(content)))
        shard.path.write_bytes((content + bytes(9))[:length])
        with pytest.raises(DataError, match=f"bytes, got {length:,}"):
            Shard(shard.path, shard.info, 2, SIZE)


def test_a_file_truncated_while_in_use_is_an_error(tmp_path: Path) -> None:
    stream = tokens(tmp_path, [[1] * 100_000], 1)
    stream.read(0, 10)
    with stream.shards[0].path.open("rb+") as file:
        file.truncate(1000)
    assert stream.read(0, 10)[0].tolist() == [1] * 10
    with pytest.raises(DataError, match="truncated") as caught:
        stream.read(90_000, 90_010)
    assert "ingot tokenize" in caught.value.hint


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    stream = tokens(tmp_path, [[1, 2]], 1)
    shard = stream.shards[0]
    shard.path.unlink()
    with pytest.raises(DataError, match="No such file"):
        stream.read(0, 1)
    with pytest.raises(DataError, match="No such file"):
        Shard(shard.path, shard.info, 2, SIZE)


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = tokens(tmp_path, [[1, 2]], 1)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(DataError, match="Input/output error"):
        stream.read(0, 1)


@pytest.mark.parametrize(
    "ends",
    [[2, 1, 3], [1, 1, 3], [0, 2, 3], [1, 2, 4], [1, 2, 2], [1, 2**63, 3]],
    ids=str,
)
def test_invalid_documents_with_a_valid_hash_are_rejected(tmp_path: Path, ends: list[int]) -> None:
    import hashlib

    path = tmp_path / "shard"
    content = np.array(ends, "<u8").tobytes() + np.array([1, 2, 3], "<u2").tobytes()
    path.write_bytes(content)
    facts = write(tmp_path / "other", [np.array([1])] * 3, 2)
    facts = msgspec.structs.replace(facts, sha256=hashlib.sha256(content).hexdigest())
    with pytest.raises(DataError, match="out of bounds"):
        Shard(path, facts, 2, 10).read(0, 1)


@pytest.mark.parametrize(("documents", "count"), [(0, 3), (-1, 3), (4, 3), (1, 2**60), (0, 0)])
def test_invalid_index_entries_are_rejected(tmp_path: Path, documents: int, count: int) -> None:
    path = tmp_path / "shard"
    facts = write(path, [np.array([1])] * 3, 2)
    wrong = msgspec.structs.replace(facts, documents=documents, tokens=count)
    with pytest.raises(DataError, match="must have"):
        Shard(path, wrong, 2, 10)


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (0, 0), (2, 1), (0, 4)])
def test_tokens_that_are_not_there(tmp_path: Path, start: int, stop: int) -> None:
    with pytest.raises(IndexError):
        tokens(tmp_path, [[1, 2, 3]], 1).read(start, stop)


def test_check_verifies_all_shards(tmp_path: Path) -> None:
    stream = tokens(tmp_path, [[1], [2], [3]], 1)
    path = stream.shards[2].path
    content = path.read_bytes()
    path.write_bytes(content[::-1])
    with pytest.raises(DataError, match=path.name):
        stream.check()
    path.write_bytes(content)
    stream.check()
