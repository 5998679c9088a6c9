from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import DataError
from ingot.data import source as module
from ingot.data.source import Source


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of at most 10 characters, read 7 bytes at a time."""
    monkeypatch.setattr(module, "MAX_DOCUMENT", 10)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 7)


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes("\ufeffÄ line\r\nand\nanother".encode())
    assert list(Source(path).documents()) == ["Ä line\r\nand\nanother"]
    assert Source(path).size() == path.stat().st_size


@pytest.mark.usefixtures("small")
@given(text=st.text(st.sampled_from("aä🦀\n"), max_size=60))
def test_a_long_text_is_cut_at_lines_the_same_way_however_it_is_read(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.mktemp("long") / "text"
    path.write_bytes(text.encode())
    found = list(Source(path).documents())
    assert "".join(found) == text
    assert all(0 < len(piece) <= 10 for piece in found)
    for piece, after in pairwise(found):
        assert piece.endswith("\n") or (len(piece) == 10 and "\n" not in piece)
        assert len(piece) == 10 or len(piece + after.partition("\n")[0]) >= 10
    line = path.with_suffix(".jsonl")
    line.write_text(json.dumps({"text": text}))
    assert list(Source(line).documents()) == found


def test_a_huge_line_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    path.write_bytes(b"x" * (1 << 20))
    assert [len(piece) for piece in Source(path).documents()] == [module.MAX_DOCUMENT] * 4


@pytest.mark.parametrize("content", [b"abc\xff", b"fine so far \xc3", b"\xed\xa0\x80"])
def test_invalid_utf8_is_an_error_with_its_position(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "latin"
    path.write_bytes(b"good\n" * 2 + content)
    with pytest.raises(DataError, match=r"near byte [12]") as caught:
        list(Source(path).documents())
    assert "iconv" in caught.value.hint


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.txt", ".hidden", ".git/config", "a/__pycache__/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c.jsonl").write_text('{"text": "in a line"}\n')
    (tmp_path / "empty.txt").touch()
    found = list(Source(tmp_path).documents())
    assert found == ["a/z.md", "a.txt", "b.txt", "in a line"]


def test_files_of_a_folder_that_are_not_text_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "late.txt").write_bytes(b"good " * 200_000 + b"\xff")
    (tmp_path / "null").write_bytes(b"good \0 bytes")
    skipped: list[Path] = []
    assert list(Source(tmp_path).documents(skipped.append)) == ["text"]
    assert [path.name for path in skipped] == ["image.png", "late.txt", "null"]
    with pytest.raises(DataError, match="not UTF-8"):
        list(Source(tmp_path).documents())


def test_links_and_pipes_are_no_trap(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    assert list(Source(tmp_path).documents()) == ["text"]


def test_a_missing_source_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file or directory") as caught:
        Source(tmp_path / "missing").files()
    assert "stdlib" in caught.value.hint
    with pytest.raises(DataError, match="contains no files"):
        Source(tmp_path).files()


def test_a_name_that_is_a_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="File name too long"):
        Source("Once upon a time " * 100).files()


def test_a_disk_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_text("text")

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(DataError, match="Input/output error"):
        list(Source(path).documents())


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "posts.jsonl"
    path.write_text('{"body": "one", "text": 5}\n\n  \n{"body": ""}\n{"body": "t\\u0077o"}')
    assert list(Source(path, "body").documents()) == ["one", "two"]


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[1]",
        b'"text"',
        b'{"text": 5}',
        b'{"text": null}',
        b'{"other": "text"}',
        b"null",
        b'{"text": "\xff"}',
        b"[" * 100_000,
        b'{"text":' * 100_000,
        b"\x80\x81",
        b'{"text": "a"} trailing',
        b'{"text": "half a character: \\ud800"}',
    ],
    ids=lambda line: line[:16].decode("latin1"),
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "posts.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=r"posts\.jsonl: line 2"):
        list(Source(path).documents())


def test_a_line_that_is_too_long_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LINE", 100)
    path = tmp_path / "posts.jsonl"
    path.write_text(json.dumps({"text": "a" * 200}))
    with pytest.raises(DataError, match="lines must have at most 100 bytes"):
        list(Source(path).documents())


def test_stdlib_excludes_installed_packages() -> None:
    files = Source("stdlib").files()
    names = {path.name for path in files}
    assert {"dataclasses.py", "argparse.py"} <= names
    assert not {"numpy", "torch", "site-packages", "test"} & {
        p for f in files for p in f.parts[-3:]
    }
