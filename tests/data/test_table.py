from __future__ import annotations

import contextlib
import struct
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from ingot.core.errors import DataError
from ingot.data.source import Source

TEXTS = ["one", None, "", "zwölf 🦀"] + [f"row {i}" for i in range(600)]
KINDS = ("parquet", "arrow", "stream", "feather")


def write(path: Path, table: Any, kind: str) -> Path:
    path = path.with_suffix(".arrow" if kind == "stream" else f".{kind}")
    if kind == "parquet":
        parquet.write_table(table, path)
        return path
    new = ipc.new_stream if kind == "stream" else ipc.new_file
    with new(str(path), table.schema) as writer:
        writer.write_table(table)
    return path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [pa.string(), pa.large_string()], ids=str)
def test_a_column_of_text(tmp_path: Path, kind: str, text: Any) -> None:
    table = pa.table({"id": list(range(len(TEXTS))), "body": pa.array(TEXTS, text)})
    path = write(tmp_path / "table", table, kind)
    assert list(Source(path, "body").documents()) == [t for t in TEXTS if t]


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_or_non_text_column_is_rejected(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "table", pa.table({"id": [1], "body": ["a"]}), kind)
    for field in ("text", "id"):
        with pytest.raises(DataError, match=f"no column '{field}'") as caught:
            list(Source(path, field).documents())
        assert "one of: body" in caught.value.hint


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60)
def test_a_file_with_wrong_bytes_is_refused_or_read_as_text(kind: str, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        table = pa.table({"text": ["one", "two", "three"] * 4})
        path = write(Path(directory, "table"), table, kind)
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        with contextlib.suppress(DataError):
            assert all(isinstance(text, str) for text in Source(path).documents())


def test_a_column_name_that_is_not_utf8_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "table", pa.table({"text": ["a"], "nameless": ["b"]}), "stream")
    path.write_bytes(path.read_bytes().replace(b"nameless", b"\xff\xfeameless"[:8]))
    with pytest.raises(DataError, match="cannot be read"):
        list(Source(path).documents())


def test_string_offsets_outside_the_file_are_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "table", pa.table({"text": ["one", "three"]}), "stream")
    right, wrong = struct.pack("<3i", 0, 3, 8), struct.pack("<3i", 0, 3, 1 << 20)
    assert path.read_bytes().count(right) == 1
    path.write_bytes(path.read_bytes().replace(right, wrong))
    with pytest.raises(DataError, match="offset"):
        list(Source(path).documents())


def test_without_pyarrow_the_hint_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(DataError, match="needs pyarrow") as caught:
        list(Source(tmp_path).documents())
    assert "ingot[data]" in caught.value.hint
