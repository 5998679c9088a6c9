"""Sources of text, read document by document in constant memory.

    Source("stdlib")         Python's own standard library, about 11 MB of text on every machine
    Source("notes.txt")      a text file
    Source("posts.jsonl")    one JSON object per line; the text is its `field`
    Source("wiki.parquet")   a column of a Parquet or Arrow file; needs pyarrow (ingot[data])
    Source("folder")         all such files below it, in the order of their names

A document longer than `MAX_DOCUMENT` characters is split, at the end of a line if there is one: it
is longer than any context, and this bounds the memory. A file that is given by name must have the
format of its suffix; in a folder, hidden files and files that are not UTF-8 text are skipped.
"""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from ingot.core.errors import DataError
from ingot.data import table

MAX_DOCUMENT = 1 << 18  # characters
MAX_LINE = 1 << 26  # bytes of a JSON line
MAX_FILES = 10_000_000
_CHUNK_BYTES = 1 << 18
_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}

Skip = Callable[[Path], None]


def _raise_not_text(path: Path) -> None:
    raise DataError(
        f"{path}: not UTF-8 text",
        hint="convert it (iconv -f latin1 -t utf-8), or name another file",
    )


@dataclass(frozen=True)
class Source:
    """Text from a file, a folder, or Python's own library ("stdlib").

    `field` is the key of the text in JSON objects and its column in tables.

    >>> next(Source("stdlib").documents()).splitlines()[0][3:]
    'Record of phased-in incompatible language changes.'
    """

    where: str | Path
    field: str = "text"

    def documents(self, skip: Skip = _raise_not_text) -> Iterator[str]:
        """Yield the documents, none of them empty; `skip` is called for non-text files."""
        for path in self.files():
            with _wrap_os_errors(path):
                yield from self._read_file(path, skip)

    def files(self) -> list[Path]:
        """List the files in the order in which they are read.

        >>> len(Source("stdlib").files()) > 100
        True
        """
        if str(self.where) == "stdlib":
            root = Path(sysconfig.get_path("stdlib"))
            return _list_files(root, lambda name: name not in _EXCLUDED, ".py")
        root = Path(self.where)
        with _wrap_os_errors(root):
            if root.is_dir():
                return _list_files(
                    root, lambda name: not name.startswith(".") and name != "__pycache__"
                )
            if not root.exists():
                raise DataError(
                    f"{root}: no such file or directory",
                    hint="name a text, .jsonl, .parquet or .arrow file, a folder, or stdlib",
                )
        return [root]

    def size(self) -> int:
        """Return the total size of the files in bytes.

        >>> Source("stdlib").size() > 1_000_000
        True
        """
        with _wrap_os_errors(Path(self.where)):
            return sum(path.stat().st_size for path in self.files())

    def _read_file(self, path: Path, skip: Skip) -> Iterator[str]:
        if path.suffix in (".jsonl", ".ndjson"):
            texts = _read_texts(path, self.field)
        elif path.suffix in table.SUFFIXES:
            texts = table.read_texts(path, self.field)
        elif path == Path(self.where) or _is_text(path):
            texts = _read_text(path)
        else:
            skip(path)
            return
        for text in texts:
            yield from _split_long(text)


@contextmanager
def _wrap_os_errors(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{error.filename or path}: cannot be read: {error.strerror or error}",
            hint="make it readable, or remove it from the source",
        ) from error


def _list_files(root: Path, include: Callable[[str], bool], suffix: str = "") -> list[Path]:
    files: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=_reraise):
        folders[:] = [name for name in folders if include(name)]
        paths = [Path(folder, name) for name in names if include(name) and name.endswith(suffix)]
        files += [path for path in paths if path.is_file()]
        if len(files) > MAX_FILES:
            raise DataError(
                f"{root}: must have at most {MAX_FILES:,} files",
                hint="join them into JSONL files, one document per line",
            )
    if not files:
        raise DataError(f"{root}: contains no files", hint="name a folder with text files")
    return sorted(files, key=lambda path: path.relative_to(root).parts)


def _reraise(error: OSError) -> None:
    raise error


def _split_long(text: str) -> Iterator[str]:
    """Split a text that is too long for one document.

    >>> list(_split_long("")), list(_split_long("a"))
    ([], ['a'])
    """
    start = 0
    while start < len(text):
        stop = start + MAX_DOCUMENT
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        yield text[start:stop]
        start = stop


def _is_text(path: Path) -> bool:
    try:
        for chunk in _decode(path):
            if "\0" in chunk:
                return False
    except DataError:
        return False
    return True


def _read_text(path: Path) -> Iterator[str]:
    text = ""
    for chunk in _decode(path):
        text += chunk
        if len(text) > MAX_DOCUMENT:
            *documents, text = _split_long(text)
            yield from documents
    yield text


def _decode(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    offset = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield decoder.decode(chunk)
                offset += len(chunk)
            yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 text: {error.reason} near byte {offset + error.start:,}",
            hint="convert it (iconv -f latin1 -t utf-8), or remove it from the source",
        ) from error


def _read_texts(path: Path, field: str) -> Iterator[str]:
    for number, record in read_jsonl(path):
        text = cast(dict[str, Any], record).get(field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            keys = list(cast(dict[str, Any], record))[:8] if isinstance(record, dict) else []
            raise DataError(
                f"{path}: line {number:,} must be an object with text in '{field}'",
                hint=f"give the key of the text with --field, of: {', '.join(keys) or 'none'}",
            )
        yield text


def read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the JSON value of each line that is not empty."""
    decoder = msgspec.json.Decoder()
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            if not line.strip():
                continue
            try:
                yield number, decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise DataError(
                    f"{path}: line {number:,} is not JSON: {error}", hint="correct the line"
                ) from error


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise DataError(
                f"{path}: lines must have at most {MAX_LINE:,} bytes",
                hint="write one JSON object per line, and split long documents",
            )
        yield line
