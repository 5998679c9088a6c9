"""Stored samples of an evaluation: `samples.jsonl`, one object for each.

Samples are appended as they are computed, so whatever stops the process leaves those that are done.
A line that a killed process left incomplete is removed when the file is opened again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ingot.core import paths
from ingot.core.errors import DataError

MAX_LINE = 1 << 28  # bytes

Sample = dict[str, Any]
Key = tuple[int, int]
"""Line of the row in the task's file, and number of the sample."""


class SampleFile:
    """The samples of an evaluation, by line and number.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with SampleFile(Path(folder, "samples.jsonl")) as file:
    ...         file.append({"line": 2, "sample": 0, "output": "b"})
    ...         file.append({"line": 1, "sample": 0, "output": "a"})
    ...         [sample["output"] for sample in file]
    ['a', 'b']
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._spans: dict[Key, tuple[int, int]] = {}  # offset and length
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise DataError(
                f"{path}: cannot be written: {error.strerror or error}",
                hint="choose another directory with --output",
            ) from error
        try:
            self._size = self._scan()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def __contains__(self, key: Key) -> bool:
        return key in self._spans

    def __len__(self) -> int:
        return len(self._spans)

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples in the order of their keys."""
        with self.path.open("rb") as file:
            for key in sorted(self._spans):
                offset, length = self._spans[key]
                file.seek(offset)
                yield msgspec.json.decode(file.read(length))

    def append(self, sample: Sample) -> None:
        """Write a sample to the file."""
        line = msgspec.json.encode(sample) + b"\n"
        self._file.write(line)
        self._file.flush()
        self._spans[sample["line"], sample["sample"]] = self._size, len(line)
        self._size += len(line)

    def rewrite(self, update: Callable[[Sample], Sample]) -> None:
        """Replace the file by one in the order of the keys, each sample replaced by `update`."""
        spans: dict[Key, tuple[int, int]] = {}
        size = 0
        with paths.atomic_file(self.path) as temporary, temporary.open("wb") as file:
            for sample in self:
                line = msgspec.json.encode(update(sample)) + b"\n"
                file.write(line)
                spans[sample["line"], sample["sample"]] = size, len(line)
                size += len(line)
        self._file.close()
        self._file = self.path.open("a+b")
        self._spans, self._size = spans, size

    def _scan(self) -> int:
        """Index the lines; return the size of the file without an incomplete last one."""
        offset = 0
        self._file.seek(0)
        for number, line in enumerate(iter(lambda: self._file.readline(MAX_LINE), b""), 1):
            if not line.endswith(b"\n"):
                self._file.truncate(offset)
                break
            try:
                sample = msgspec.json.decode(line)
                key = int(sample["line"]), int(sample["sample"])
            except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
                raise DataError(
                    f"{self.path}: line {number:,} is not a sample: {error}",
                    hint="delete the directory to start again, or correct the line",
                ) from error
            self._spans[key] = offset, len(line)
            offset += len(line)
        return offset
