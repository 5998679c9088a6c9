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
    """A text, where it belongs, and how much of the source it is."""

    part: Split
    text: str
    digest: bytes
    bytes: int

    def chosen(self, share: float) -> bool:
        """Whether it is in a share of the documents, whichever part it belongs to."""
        # The last bytes of the hash: the first have decided about the part.
        return _below(self.digest[-8:], share)


@dataclass
class SourceScan:
    """What a source holds, by its first reading: `SourceScan.of(source, fraction)`.

    `sha256` is the hash of all of it, in its order.
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
        """Read the source; at least one document is in it, or else it is an error."""
        if not 0 <= fraction <= 0.5:
            raise ConfigError(
                f"validation fraction: must be from 0 to 0.5, got {fraction}", hint="give 0 to 0.5"
            )
        found, skipped, whole = cls(source, fraction), list[Path](), hashlib.sha256()
        with log.progress("reading", source.size(), in_bytes=True) as bar:
            for text in source.documents(skipped.append):
                content = text.encode()
                found._add(digest := hashlib.sha256(content).digest(), len(content))
                whole.update(digest)
                bar.advance(len(content))
        if skipped:
            log.logger(__name__).warning(
                "skipped %d files that are not UTF-8 text; the first is %s",
                len(skipped),
                skipped[0],
            )
        if not found.documents:
            raise DataError(
                f"{source.where}: contains no text", hint="name a source with documents in it"
            )
        found.sha256 = whole.hexdigest()
        return found

    def read(self) -> Iterator[Document]:
        """The documents once more; an error at their end if they are not the same."""
        whole = hashlib.sha256()
        for text in self.source.documents(lambda path: None):
            content = text.encode()
            whole.update(digest := hashlib.sha256(content).digest())
            if self.documents == 1 and self.fraction:
                border = _border(text, self.fraction)
                yield Document("train", text[:border], digest, len(content))
                if text[border:]:
                    yield Document("validation", text[border:], digest, 0)
            else:
                yield Document(self._part(digest), text, digest, len(content))
        if whole.hexdigest() != self.sha256:
            raise DataError(
                f"{self.source.where} has changed while it was read",
                hint="run again when the source is no longer written to",
            )

    def _add(self, digest: bytes, num_bytes: int) -> None:
        self.documents += 1
        self.bytes += num_bytes
        self._num_validation += _below(digest[:8], self.fraction)
        self._smallest = min(self._smallest, digest)

    def _part(self, digest: bytes) -> Split:
        held_out = _below(digest[:8], self.fraction)
        if self._num_validation in (0, self.documents):
            held_out = self.fraction > 0 and digest == self._smallest
        return "validation" if held_out else "train"


def _below(digest: bytes, share: float) -> bool:
    """Whether eight bytes of a hash are in the lowest share of all that there are.

    >>> _below(bytes(8), 0.0), _below(bytes(8), 0.01), _below(bytes([255] * 8), 1.0)
    (False, True, True)
    """
    return int.from_bytes(digest, "big") < share * 2**64


def _border(text: str, fraction: float) -> int:
    """Return where the validation part of a single document begins: at a line, if there is one.

    >>> _border("one\\ntwo\\nthree\\n", 0.3), _border("word", 0.01)
    (8, 3)
    """
    wanted = min(int(len(text) * (1 - fraction)), len(text) - 1)
    return text.rfind("\n", 0, wanted) + 1 or max(wanted, 1)
