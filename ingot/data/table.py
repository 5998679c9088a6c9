"""Columns of Parquet and Arrow files, read with pyarrow.

The files are not trusted: pyarrow does not check the string offsets in an Arrow file by default, so
that they could point anywhere. Every column is validated.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ingot.core.errors import DataError

SUFFIXES = (".parquet", ".arrow", ".feather")
BATCH_ROWS = 256


def read_texts(path: Path, field: str) -> Iterator[str]:
    """Yield the texts of a column; those that are null or empty are left out."""
    with _wrap_errors(path):
        for batch in _batches(path, lambda schema: _check(path, field, schema)):
            yield from (text for text in batch.column(0).to_pylist() if text)


def read_records(path: Path, keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows as objects with these keys, as far as the file has columns of these names."""

    def choose(schema: Any) -> list[str]:
        columns = [key for key in keys if schema.names.count(key) == 1]
        if not columns:
            raise DataError(
                f"{path}: has none of the columns {', '.join(keys)}",
                hint=f"rename a column; it has: {', '.join(schema.names[:8]) or 'none'}",
            )
        return columns

    with _wrap_errors(path):
        for batch in _batches(path, choose):
            yield from batch.to_pylist()


@contextmanager
def _wrap_errors(path: Path) -> Generator[None]:
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise DataError(
            f"{path}: reading it needs pyarrow", hint="pip install 'ingot[data]'"
        ) from error
    try:
        yield
    except (pa.ArrowException, ValueError) as error:  # column names that are not UTF-8
        raise DataError(
            f"{path}: cannot be read: {str(error)[:500]}",
            hint="download or export the file again",
        ) from error


def _batches(path: Path, choose: Any) -> Iterator[Any]:
    """Yield validated batches of a few rows with the columns that `choose(schema)` returns."""
    for batch in _read(path, choose):
        for column in batch.columns:
            column.validate(full=True)
        for start in range(0, len(batch), BATCH_ROWS):
            yield batch.slice(start, BATCH_ROWS)


def _read(path: Path, choose: Any) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import ipc, parquet

    if path.suffix == ".parquet":
        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(BATCH_ROWS, columns=choose(file.schema_arrow))
        return
    with pa.OSFile(str(path)) as file:
        magic = file.read(6)
        file.seek(0)
        if magic == b"ARROW1":
            reader = ipc.open_file(file)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = reader = ipc.open_stream(file)
        columns = choose(reader.schema)
        for batch in batches:
            yield batch.select(columns)


def _check(path: Path, field: str, schema: Any) -> list[str]:
    """Return the name of the column in a list, if it is one of strings."""
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        return types.is_string(kind) or types.is_large_string(kind)

    columns = [column.name for column in schema if is_text(column.type)]
    if columns.count(field) != 1:
        raise DataError(
            f"{path}: has no column '{field}' of strings",
            hint=f"give a column with --field, one of: {', '.join(columns[:8]) or 'none'}",
        )
    return [field]
