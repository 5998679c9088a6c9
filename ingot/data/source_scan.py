"""The first pass over a source, which decides which documents are used for validation.

A document is used for validation if the hash of its text is below the fraction: this does not
change when documents are added or removed, and equal texts are never in both splits. If that
selects no document, or all, the document with the smallest hash is taken; of a single document, its
end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from ingot.core import log
from ingot.core.errors import ConfigError, DataError
from ingot.data.source import Source

Split = Literal["train", "validation"]


class Document(NamedTuple):
    """A text with its split, its hash and its size in the source."""

    split: Split
    text: str
    digest: bytes
    bytes: int

    def is_sampled(self, fraction: float) -> bool:
        """Return whether it is in a random fraction of the documents, independent of the split."""
        # The last bytes of the hash: the first determine the split.
        return is_below(self.digest[-8:], fraction)


@dataclass
class SourceScan:
    """Size and hash of a source, from its first pass: `SourceScan.of(source, fraction)`.

    `sha256` is the hash of all documents in their order.
    """

    source: Source
    fraction: float
    documents: int = 0
    bytes: int = 0
    sha256: str = ""
    _num_validation: int = 0
    _smallest: bytes = b"\xff" * 32

    @classmethod
    def of(cls, source: Source, fraction: float) -> SourceScan:
        """Read the source; raise an error if it has no documents."""
        if not 0 <= fraction <= 0.5:
            raise ConfigError(
                f"validation fraction: must be from 0 to 0.5, got {fraction}", hint="give 0 to 0.5"
            )
        scan, skipped, whole = cls(source, fraction), list[Path](), hashlib.sha256()
        with log.progress("reading", source.size(), in_bytes=True) as bar:
            for text in source.documents(skipped.append):
                content = text.encode()
                scan._add(digest := hashlib.sha256(content).digest(), len(content))
                whole.update(digest)
                bar.advance(len(content))
        if skipped:
            log.logger(__name__).warning(
                "skipped %d files that are not UTF-8 text; the first is %s",
                len(skipped),
                skipped[0],
            )
        if not scan.documents:
            raise DataError(
                f"{source.where}: contains no text", hint="name a source with documents in it"
            )
        scan.sha256 = whole.hexdigest()
        return scan

    def read(self) -> Iterator[Document]:
        """Yield the documents again; raise an error at the end if they have changed."""
        whole = hashlib.sha256()
        for text in self.source.documents(lambda path: None):
            content = text.encode()
            whole.update(digest := hashlib.sha256(content).digest())
            if self.documents == 1 and self.fraction:
                border = _split_point(text, self.fraction)
                yield Document("train", text[:border], digest, len(content))
                if text[border:]:
                    yield Document("validation", text[border:], digest, 0)
            else:
                yield Document(self._assign_split(digest), text, digest, len(content))
        if whole.hexdigest() != self.sha256:
            raise DataError(
                f"{self.source.where}: has changed while it was read",
                hint="run again when the source is no longer written to",
            )

    def _add(self, digest: bytes, num_bytes: int) -> None:
        self.documents += 1
        self.bytes += num_bytes
        self._num_validation += is_below(digest[:8], self.fraction)
        self._smallest = min(self._smallest, digest)

    def _assign_split(self, digest: bytes) -> Split:
        is_validation = is_below(digest[:8], self.fraction)
        if self._num_validation in (0, self.documents):
            is_validation = self.fraction > 0 and digest == self._smallest
        return "validation" if is_validation else "train"


def is_below(digest: bytes, fraction: float) -> bool:
    """Return whether eight bytes of a hash are in this lowest fraction of all values.

    >>> is_below(bytes(8), 0.0), is_below(bytes(8), 0.01), is_below(bytes([255] * 8), 1.0)
    (False, True, True)
    """
    return int.from_bytes(digest, "big") < fraction * 2**64


def _split_point(text: str, fraction: float) -> int:
    """Return where the validation part of a single document begins: at a line, if there is one.

    >>> _split_point("one\\ntwo\\nthree\\n", 0.3), _split_point("word", 0.01)
    (8, 3)
    """
    wanted = min(int(len(text) * (1 - fraction)), len(text) - 1)
    return text.rfind("\n", 0, wanted) + 1 or max(wanted, 1)
