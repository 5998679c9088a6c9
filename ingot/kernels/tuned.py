"""The database of what `ingot tune` found on this machine, or on others of the same kind.

    rows = load(key)                         # the stored configuration, or None
    save(key, config, score)
    export(path), import_(path)              # to and from other machines

A key is a kernel, its source, a bucket of shapes, a dtype and a device; a kernel whose source
changes loses its configurations. Values are text that the kernels' own modules check before use, so
a damaged or foreign database costs speed, never correctness.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec

from ingot.core import paths
from ingot.core.errors import IngotError

MAX_FILE_BYTES = 16 * 2**20
_SCHEMA = """create table if not exists tuned (
    kernel text, source text, bucket text, dtype text, device text,
    config text not null, score real not null,
    primary key (kernel, source, bucket, dtype, device)
)"""


Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]


class Key(msgspec.Struct, frozen=True):
    """What a configuration is for."""

    kernel: Text
    source: Text
    bucket: Text
    dtype: Text
    device: Text


class Entry(Key, frozen=True):
    """A row of the database."""

    config: Text
    score: Annotated[float, msgspec.Meta(ge=0)]
    """See `save`."""


def database_path() -> Path:
    """Return the path of the database."""
    return paths.cache("tuned.db")


def save(key: Key, config: str, score: float) -> None:
    """Store the best configuration for a key, and how good it is, for people who read the file.

    On a GPU the score is the microseconds of a call, on a CPU the speedup over the defaults.
    """
    _insert([Entry(**msgspec.structs.asdict(key), config=config, score=score)])


def load(key: Key) -> str | None:
    """Return the stored configuration; None if there is none or the database cannot be read."""
    where = " and ".join(f"{name} = ?" for name in Key.__struct_fields__)
    rows = _select(f"select config from tuned where {where}", msgspec.structs.astuple(key))
    return rows[0][0] if rows and isinstance(rows[0][0], str) else None


def load_elsewhere(key: Key) -> list[str]:
    """Return the configurations of other devices for an otherwise equal key."""
    rows = _select(
        "select config from tuned where kernel = ? and source = ? and bucket = ? and dtype = ? "
        "and device != ?",
        msgspec.structs.astuple(key),
    )
    return [row[0] for row in rows if isinstance(row[0], str)]


def export(path: Path) -> int:
    """Write all configurations to a JSON file; return how many."""
    rows = _select("select * from tuned order by 1, 2, 3, 4, 5")
    entries = [dict(zip(Entry.__struct_fields__, row, strict=True)) for row in rows]
    paths.write_atomic(path, json.dumps(entries, indent=1) + "\n")
    return len(entries)


def import_(path: Path) -> int:
    """Add the configurations of such a file; return how many.

    Those that this machine has already are replaced.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES:,} bytes")
        entries = msgspec.json.decode(path.read_bytes(), type=list[Entry])
    except (OSError, ValueError, RecursionError) as error:
        raise IngotError(
            f"{path}: cannot read tuned configurations: {error}",
            hint="write the file with `ingot tune --export FILE`",
        ) from None
    _insert(entries)
    return len(entries)


def _insert(entries: list[Entry]) -> None:
    path = database_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with closing(sqlite3.connect(path, timeout=60)) as database, database:
            database.execute(_SCHEMA)
            rows = [msgspec.structs.astuple(entry) for entry in entries]
            database.executemany("insert or replace into tuned values (?, ?, ?, ?, ?, ?, ?)", rows)
    except sqlite3.Error as error:
        raise IngotError(
            f"{path}: cannot store tuned configurations: {error}",
            hint="if the file is damaged, delete it; what it holds can be found again",
        ) from None


def _select(query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not database_path().exists():
        return []
    uri = f"file:{database_path()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=60)) as database:
            return database.execute(query, values).fetchall()
    except sqlite3.Error:
        return []
