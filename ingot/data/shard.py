"""Shards: files of about 64 MB with the tokens of documents.

A shard has the end offsets of its documents and then their tokens, raw and little-endian:

    ends_D     uint64, the end of each document, in tokens from the start of the shard
    tokens_N   uint16, or uint32 for vocabularies that need it

The index of the dataset holds both counts and the SHA-256 of the file. The first access reads and
verifies the whole shard; later ones read only the requested tokens. The file is read and not
memory-mapped: if a mapped file is truncated or its disk fails, SIGBUS kills the process without a
message, whereas a failed read raises an error with a hint.

Legend: D documents, N tokens of a shard, T requested tokens.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ingot.core.errors import DataError

MAX_TOKENS = 1 << 48
_CHUNK_BYTES = 1 << 22

Ints = NDArray[np.int64]


class ShardInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Entry of a shard in the index."""

    documents: int
    tokens: int
    sha256: str


def write(path: Path, documents: Sequence[NDArray[Any]], itemsize: int) -> ShardInfo:
    """Write documents to a shard; none of them may be empty.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "shard")
    >>> write(path, [np.array([5, 6]), np.array([7])], 2).tokens, path.stat().st_size
    (3, 22)
    """
    ends_D = np.cumsum([len(document) for document in documents], dtype="<u8")
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for part in (ends_D, *(document.astype(f"<u{itemsize}") for document in documents)):
            content = part.tobytes()
            digest.update(content)
            file.write(content)
    return ShardInfo(documents=len(documents), tokens=int(ends_D[-1]), sha256=digest.hexdigest())


class Shard:
    """One file of tokens below `vocab_size`. The constructor checks only the size of the file."""

    def __init__(self, path: Path, info: ShardInfo, itemsize: int, vocab_size: int) -> None:
        self.path, self.info = path, info
        self._itemsize, self._vocab_size = itemsize, vocab_size
        self._ends_D: Ints | None = None
        try:
            actual = path.stat().st_size
        except OSError as error:
            raise _read_error(path, error.strerror or str(error)) from error
        expected = self._offset(info.tokens)
        if not 0 < info.documents <= info.tokens <= MAX_TOKENS or actual != expected:
            raise _read_error(path, f"must have {expected:,} bytes, got {actual:,}")

    @property
    def ends_D(self) -> Ints:
        """End offset of each document; the first access reads and verifies the whole file."""
        if self._ends_D is None:
            self._ends_D = self._verify()
        return self._ends_D

    def read(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return the tokens from start to stop, and the document ends among these positions."""
        ends_D = self.ends_D
        content = b"".join(self._read_chunks(self._offset(start), self._offset(stop)))
        low, high = np.searchsorted(ends_D, (start, stop), side="right")
        return np.frombuffer(content, f"<u{self._itemsize}").astype(np.int64), ends_D[low:high]

    def _offset(self, token: int) -> int:
        return 8 * self.info.documents + self._itemsize * token

    def _verify(self) -> Ints:
        digest, largest = hashlib.sha256(), 0
        ends = b"".join(self._read_chunks(0, self._offset(0)))
        digest.update(ends)
        for chunk in self._read_chunks(self._offset(0), self._offset(self.info.tokens)):
            digest.update(chunk)
            largest = max(largest, int(np.frombuffer(chunk, f"<u{self._itemsize}").max()))
        if digest.hexdigest() != self.info.sha256:
            raise _read_error(self.path, "its hash does not match its content")
        ends_D = np.frombuffer(ends, "<u8").astype(np.int64)
        ascending = bool((np.diff(ends_D, prepend=0) > 0).all())
        if not ascending or ends_D[-1] != self.info.tokens or largest >= self._vocab_size:
            raise _read_error(self.path, "document ends or tokens are out of bounds")
        return ends_D

    def _read_chunks(self, first: int, last: int) -> Iterator[bytes]:
        """Yield the bytes from first to last in chunks of whole tokens, or raise an error."""
        try:
            with self.path.open("rb") as file:
                file.seek(first)
                for start in range(first, last, _CHUNK_BYTES):
                    size = min(_CHUNK_BYTES, last - start)
                    chunk = file.read(size)
                    if len(chunk) < size:
                        raise _read_error(self.path, "the file was truncated")
                    yield chunk
        except OSError as error:
            raise _read_error(self.path, error.strerror or str(error)) from error


class TokenStream:
    """Tokens of the documents of several shards.

    >>> len(TokenStream([]))
    0
    """

    def __init__(self, shards: Sequence[Shard]) -> None:
        self.shards = tuple(shards)
        self.documents = sum(shard.info.documents for shard in shards)
        self._starts = [0, *accumulate(shard.info.tokens for shard in shards)]

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return the tokens from start to stop, and the document ends relative to start."""
        if not 0 <= start < stop <= len(self):
            raise IndexError(f"range must be within the {len(self)} tokens, got {start} to {stop}")
        tokens: list[Ints] = []
        ends: list[Ints] = []
        for number in range(bisect_right(self._starts, start) - 1, len(self.shards)):
            base = self._starts[number]
            if base >= stop:
                break
            shard = self.shards[number]
            first, last = max(start - base, 0), min(stop - base, shard.info.tokens)
            tokens_T, ends_in_shard = shard.read(first, last)
            tokens.append(tokens_T)
            ends.append(ends_in_shard + (base - start))
        return np.concatenate(tokens), np.concatenate(ends)

    def check(self) -> None:
        """Verify every shard now instead of at its first access."""
        for shard in self.shards:
            _ = shard.ends_D


def _read_error(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path}: tokens cannot be read: {reason}",
        hint=f"restore the file, or delete {path.parent} and run `ingot tokenize` again",
    )
