"""Tokens on disk, in files of about 64 MB.

A shard is the ends of its documents and then their tokens, raw and little-endian:

    ends_D     uint64, where each document ends, counted in tokens from the shard's own start
    tokens_N   uint16, or uint32 for vocabularies that need it

How many of either, and the SHA-256 of the file, stands in the index of the corpus. A shard is read
whole and checked when it is first touched; from then on only what is asked for is read. It is read
and not mapped into memory: under a map, a file that is cut or a disk that fails ends the process
by SIGBUS, without a word; a read that fails is an error with a hint.

Legend: D documents, N tokens of a shard, T tokens that are asked for.
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
_CHUNK = 1 << 22  # bytes

Ints = NDArray[np.int64]


class ShardInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the index says about a shard."""

    documents: int
    tokens: int
    sha256: str


def write(path: Path, documents: Sequence[NDArray[Any]], itemsize: int) -> ShardInfo:
    """Write these documents as a shard; none of them may be empty.

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
    """One file of tokens, each below `size`. BuildInputs by looking at the file's length alone."""

    def __init__(self, path: Path, info: ShardInfo, itemsize: int, size: int) -> None:
        self.path, self.info = path, info
        self._itemsize, self._size = itemsize, size
        self._ends_D: Ints | None = None
        try:
            found = path.stat().st_size
        except OSError as error:
            raise _broken(path, error.strerror or str(error)) from error
        expected = self._place(info.tokens)
        if not 0 < info.documents <= info.tokens <= MAX_TOKENS or found != expected:
            raise _broken(path, f"it has {found:,} bytes instead of {expected:,}")

    @property
    def ends_D(self) -> Ints:
        """Where each document ends; the first call reads and checks the whole file."""
        if self._ends_D is None:
            self._ends_D = self._checked()
        return self._ends_D

    def read(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """The tokens from start to stop, and which of those places are ends of documents."""
        ends_D = self.ends_D
        content = b"".join(self._bytes(self._place(start), self._place(stop)))
        low, high = np.searchsorted(ends_D, (start, stop), side="right")
        return np.frombuffer(content, f"<u{self._itemsize}").astype(np.int64), ends_D[low:high]

    def _place(self, token: int) -> int:
        return 8 * self.info.documents + self._itemsize * token

    def _checked(self) -> Ints:
        digest, largest = hashlib.sha256(), 0
        ends = b"".join(self._bytes(0, self._place(0)))
        digest.update(ends)
        for chunk in self._bytes(self._place(0), self._place(self.info.tokens)):
            digest.update(chunk)
            largest = max(largest, int(np.frombuffer(chunk, f"<u{self._itemsize}").max()))
        if digest.hexdigest() != self.info.sha256:
            raise _broken(self.path, "its content is not what was written")
        ends_D = np.frombuffer(ends, "<u8").astype(np.int64)
        rising = bool((np.diff(ends_D, prepend=0) > 0).all())
        if not rising or ends_D[-1] != self.info.tokens or largest >= self._size:
            raise _broken(self.path, "its documents or tokens are out of bounds")
        return ends_D

    def _bytes(self, first: int, last: int) -> Iterator[bytes]:
        """Yield the bytes from first to last in chunks of whole tokens, or raise an error."""
        try:
            with self.path.open("rb") as file:
                file.seek(first)
                for start in range(first, last, _CHUNK):
                    wanted = min(_CHUNK, last - start)
                    chunk = file.read(wanted)
                    if len(chunk) < wanted:
                        raise _broken(self.path, "it has become shorter")
                    yield chunk
        except OSError as error:
            raise _broken(self.path, error.strerror or str(error)) from error


class TokenStream:
    """The documents of several shards as one stream of tokens.

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
        """The tokens from start to stop, and where documents end, counted from start."""
        if not 0 <= start < stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        tokens: list[Ints] = []
        ends: list[Ints] = []
        for number in range(bisect_right(self._starts, start) - 1, len(self.shards)):
            base = self._starts[number]
            if base >= stop:
                break
            shard = self.shards[number]
            first, last = max(start - base, 0), min(stop - base, shard.info.tokens)
            tokens_T, found = shard.read(first, last)
            tokens.append(tokens_T)
            ends.append(found + (base - start))
        return np.concatenate(tokens), np.concatenate(ends)

    def check(self) -> None:
        """Read and check every shard now, rather than when it is first needed."""
        for shard in self.shards:
            _ = shard.ends_D


def _broken(path: Path, why: str) -> DataError:
    return DataError(
        f"cannot read the tokens in {path}: {why}",
        hint=f"restore the file, or delete {path.parent} and make it again with `ingot tokenize`",
    )
