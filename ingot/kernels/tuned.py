"""The database of what `ingot tune` found on this machine, or on others of the same kind.

    rows = load(key)                         # the stored configuration, or None
    save(key, config, cost)
    export(path), import_(path)              # to and from other machines

A key is a kernel, its source, a bucket of shapes, a dtype and a device; a kernel whose source
changes loses its configurations. Values are text that the kernels' own modules check before use, so
a damaged or foreign database costs speed, never correctness.
"""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from ingot.core import paths
from ingot.core.errors import IngotError

MAX_FILE_BYTES = 16 * 2**20
MAX_TEXT = 4096
_SCHEMA = """create table if not exists tuned (
    kernel text, source text, bucket text, dtype text, device text,
    config text not null, microseconds real not null,
    primary key (kernel, source, bucket, dtype, device)
)"""


@dataclass(frozen=True)
class Key:
    """What a configuration is for."""

    kernel: str
    source: str
    bucket: str
    dtype: str
    device: str


def database_path() -> Path:
    """Return the path of the database."""
    return paths.cache("tuned.db")


def save(key: Key, config: str, cost: float) -> None:
    """Store the best configuration for a key, and its time.

    On a GPU these are the microseconds of a call; on a CPU the time is relative to the defaults.
    """
    _insert([(*asdict(key).values(), config, cost)])


def load(key: Key) -> str | None:
    """Return the stored configuration; None if there is none or the database cannot be read."""
    where = " and ".join(f"{field.name} = ?" for field in fields(Key))
    rows = _select(f"select config from tuned where {where}", tuple(asdict(key).values()))
    return rows[0][0] if rows and isinstance(rows[0][0], str) else None


def export(path: Path) -> int:
    """Write all configurations to a JSON file; return how many."""
    rows = _select("select * from tuned order by 1, 2, 3, 4, 5")
    names = [*(field.name for field in fields(Key)), "config", "microseconds"]
    found = [dict(zip(names, row, strict=True)) for row in rows]
    paths.write_atomic(path, json.dumps(found, indent=1) + "\n")
    return len(found)


def import_(path: Path) -> int:
    """Add the configurations of such a file; return how many.

    Those that this machine has already are replaced.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise IngotError(f"{path}: larger than {MAX_FILE_BYTES:,} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise IngotError(
            f"{path}: cannot read tuned configurations: {error}",
            hint="write the file with `ingot tune --export FILE`",
        ) from None
    names = [*(field.name for field in fields(Key)), "config"]
    rows: list[tuple[object, ...]] = []
    for number, row in enumerate(found if isinstance(found, list) else [None], 1):
        values = [row.get(name) for name in names] if isinstance(row, dict) else [None]
        seconds = row.get("microseconds") if isinstance(row, dict) else None
        is_text = all(isinstance(value, str) and len(value) <= MAX_TEXT for value in values)
        is_time = isinstance(seconds, int | float) and 0 <= seconds < math.inf
        if not is_text or not is_time:
            raise IngotError(
                f"{path}: entry {number} is not a tuned configuration",
                hint="write the file with `ingot tune --export FILE`",
            )
        rows.append((*values, float(seconds)))
    _insert(rows)
    return len(rows)


def _insert(rows: list[tuple[object, ...]]) -> None:
    path = database_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with closing(sqlite3.connect(path, timeout=60)) as database, database:
            database.execute(_SCHEMA)
            database.executemany("insert or replace into tuned values (?, ?, ?, ?, ?, ?, ?)", rows)
    except sqlite3.Error as error:
        raise IngotError(
            f"{path}: cannot store tuned configurations: {error}",
            hint="if the file is damaged, delete it; what it holds can be found again",
        ) from None


def _select(query: str, values: tuple[str, ...] = ()) -> list[tuple[object, ...]]:
    if not database_path().exists():
        return []
    uri = f"file:{database_path()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=60)) as database:
            return database.execute(query, values).fetchall()
    except sqlite3.Error:
        return []
