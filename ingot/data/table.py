"""Text in a column of a Parquet or Arrow file, through pyarrow.

Neither is trusted: the offsets of strings in a file of Arrow are taken as they are unless one has
them checked, and could point anywhere.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ingot.core.errors import DataError

SUFFIXES = (".parquet", ".arrow", ".feather")
ROWS = 256  # at a time


def read_texts(path: Path, field: str) -> Iterator[str]:
    """The texts of the column, row after row; those that are null or empty are left out."""
    try:
        import pyarrow as pa
    except ModuleNotFoundError as error:
        raise DataError(
            f"reading {path} needs pyarrow", hint="pip install 'ingot[data]'"
        ) from error
    try:
        for column in _columns(path, field):
            column.validate(full=True)
            for start in range(0, len(column), ROWS):
                yield from (text for text in column[start : start + ROWS].to_pylist() if text)
    except (pa.ArrowException, ValueError) as error:  # names that are no UTF-8
        raise DataError(
            f"cannot read {path}: {str(error)[:500]}",
            hint="copy the file again from where it comes from",
        ) from error


def _columns(path: Path, field: str) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import ipc, parquet

    if path.suffix == ".parquet":
        with parquet.ParquetFile(path) as file:
            _check(path, field, file.schema_arrow)
            for batch in file.iter_batches(ROWS, columns=[field]):
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

    found = [column.name for column in schema if is_text(column.type)]
    if found.count(field) != 1:
        raise DataError(
            f"{path} has no column '{field}' of text",
            hint=f"name one by --field; there is: {', '.join(found[:8]) or 'none'}",
        )
