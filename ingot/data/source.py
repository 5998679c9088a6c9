"""Where text comes from: one document after another, as strings, of any size and in little memory.

    Source("stdlib")         Python's own standard library, about 11 MB of text on every machine
    Source("notes.txt")      a text file
    Source("posts.jsonl")    a JSON object a line; the text is its `field`
    Source("wiki.parquet")   a column of a Parquet or Arrow file; needs pyarrow (ingot[data])
    Source("folder")         all of these below it, in the order of their names

A document longer than `MAX_DOCUMENT` characters is cut into several, at an end of a line if there
is one: no context reaches that far, and memory has an end. A file that is named has to be what its
name says; in a folder, files that are not UTF-8 text are skipped, and so are hidden ones.
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
MAX_LINE = 1 << 26  # bytes of a line of JSON
MAX_FILES = 10_000_000
_CHUNK = 1 << 18
_FOREIGN = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}

Skip = Callable[[Path], None]


def _raise(path: Path) -> None:
    raise DataError(
        f"{path} is not UTF-8 text",
        hint="convert it (iconv -f latin1 -t utf-8), or name another file",
    )


@dataclass(frozen=True)
class Source:
    """Text from a file, a folder, or Python's own library ("stdlib").

    `field` is the name of the text in JSON and in tables.

    >>> next(Source("stdlib").documents()).splitlines()[0][3:]
    'Record of phased-in incompatible language changes.'
    """

    where: str | Path
    field: str = "text"

    def documents(self, skip: Skip = _raise) -> Iterator[str]:
        """Yield the documents, none of them empty; `skip` is called for non-text files."""
        for path in self.files():
            with _readable(path):
                yield from self._of_file(path, skip)

    def files(self) -> list[Path]:
        """The files, in the order in which they are read.

        >>> len(Source("stdlib").files()) > 100
        True
        """
        if str(self.where) == "stdlib":
            root = Path(sysconfig.get_path("stdlib"))
            return _below(root, lambda name: name not in _FOREIGN, ".py")
        root = Path(self.where)
        with _readable(root):
            if root.is_dir():
                return _below(root, lambda name: not name.startswith(".") and name != "__pycache__")
            if not root.exists():
                raise DataError(
                    f"{root}: no such file or directory",
                    hint="name a text, .jsonl, .parquet or .arrow file, a folder, or stdlib",
                )
        return [root]

    def size(self) -> int:
        """The bytes of the files.

        >>> Source("stdlib").size() > 1_000_000
        True
        """
        with _readable(Path(self.where)):
            return sum(path.stat().st_size for path in self.files())

    def _of_file(self, path: Path, skip: Skip) -> Iterator[str]:
        if path.suffix in (".jsonl", ".ndjson"):
            texts = _of_lines(path, self.field)
        elif path.suffix in table.SUFFIXES:
            texts = table.read_texts(path, self.field)
        elif path == Path(self.where) or _is_text(path):
            texts = _of_text(path)
        else:
            skip(path)
            return
        for text in texts:
            yield from _split_long(text)


@contextmanager
def _readable(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or path}: {error.strerror or error}",
            hint="make it readable, or leave it out",
        ) from error


def _below(root: Path, wanted: Callable[[str], bool], suffix: str = "") -> list[Path]:
    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=_raised):
        folders[:] = [name for name in folders if wanted(name)]
        paths = [Path(folder, name) for name in names if wanted(name) and name.endswith(suffix)]
        found += [path for path in paths if path.is_file()]
        if len(found) > MAX_FILES:
            raise DataError(
                f"there are more than {MAX_FILES:,} files below {root}",
                hint="join them into JSONL files, a line each",
            )
    if not found:
        raise DataError(f"there are no files below {root}", hint="name a folder with text in it")
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _raised(error: OSError) -> None:
    raise error


def _split_long(text: str) -> Iterator[str]:
    """Cut what is too long.

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
        for chunk in _decoded(path):
            if "\0" in chunk:
                return False
    except DataError:
        return False
    return True


def _of_text(path: Path) -> Iterator[str]:
    held = ""
    for chunk in _decoded(path):
        held += chunk
        if len(held) > MAX_DOCUMENT:
            *whole, held = _split_long(held)
            yield from whole
    yield held


def _decoded(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    done = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                yield decoder.decode(chunk)
                done += len(chunk)
            yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: {error.reason} near byte {done + error.start:,}",
            hint="convert it (iconv -f latin1 -t utf-8), or leave it out",
        ) from error


def _of_lines(path: Path, field: str) -> Iterator[str]:
    decoder = msgspec.json.Decoder()
    with path.open("rb") as file:
        for number, line in enumerate(_lines(file, path), 1):
            if not line.strip():
                continue
            try:
                found: Any = decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise DataError(
                    f"line {number:,} of {path} is not JSON: {error}", hint="correct that line"
                ) from error
            text = cast(dict[str, Any], found).get(field) if isinstance(found, dict) else None
            if not isinstance(text, str):
                keys = list(cast(dict[str, Any], found))[:8] if isinstance(found, dict) else []
                raise DataError(
                    f"line {number:,} of {path} is not an object with text in '{field}'",
                    hint=f"name its field by --field; there is: {', '.join(keys) or 'none'}",
                )
            yield text


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            raise DataError(
                f"{path} has a line of more than {MAX_LINE:,} bytes",
                hint="it is not one JSON object a line, or needs to be split into documents",
            )
        yield line
