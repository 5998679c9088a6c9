"""Text columns of Parquet and Arrow files, read with pyarrow.

The files are not trusted: pyarrow does not check the string offsets in an Arrow file by default, so
that they could point anywhere. Every column is validated.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ingot.core.errors import DataError

SUFFIXES = (".parquet", ".arrow", ".feather")
BATCH_ROWS = 256


def read_texts(path: Path, field: str) -> Iterator[str]:
    """Yield the texts of a column; those that are null or empty are left out."""
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise DataError(
            f"{path}: reading it needs pyarrow", hint="pip install 'ingot[data]'"
        ) from error
    try:
        for column in _columns(path, field):
            column.validate(full=True)
            for start in range(0, len(column), BATCH_ROWS):
                yield from (text for text in column[start : start + BATCH_ROWS].to_pylist() if text)
    except (pa.ArrowException, ValueError) as error:  # column names that are not UTF-8
        raise DataError(
            f"{path}: cannot be read: {str(error)[:500]}",
            hint="download or export the file again",
        ) from error


def _columns(path: Path, field: str) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import ipc, parquet

    if path.suffix == ".parquet":
        with parquet.ParquetFile(path) as file:
            _check(path, field, file.schema_arrow)
            for batch in file.iter_batches(BATCH_ROWS, columns=[field]):
                yield batch.column(0)
        return
    with pa.OSFile(str(path)) as file:
        magic = file.read(6)
        file.seek(0)
        if magic == b"ARROW1":
            reader = ipc.open_file(file)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            batches = reader = ipc.open_stream(file)
        _check(path, field, reader.schema)
        for batch in batches:
            yield batch.column(reader.schema.get_field_index(field))


def _check(path: Path, field: str, schema: Any) -> None:
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        return types.is_string(kind) or types.is_large_string(kind)

    columns = [column.name for column in schema if is_text(column.type)]
    if columns.count(field) != 1:
        raise DataError(
            f"{path}: has no column '{field}' of strings",
            hint=f"give a column with --field, one of: {', '.join(columns[:8]) or 'none'}",
        )
