"""A corpus: a directory of tokens, with what they were made of.

    data.json               the index: source, settings, tokenizer, shards, all with their hashes
    tokenizer.json ...      the vocabulary, as a model directory has it
    train-00000.tokens      shards (`ingot.data.shard`)
    validation-00000.tokens

`prepare` makes one. It reads the source once to count and to hash it, trains a vocabulary unless it
is given one, and tokenizes. The directory appears when all of it is there; if it is there already
and made of the same, it is taken as it is.

A document is held out for validation if the hash of its text falls below the wanted fraction: that
does not change when other documents come and go, and the same text is never on both sides. Where
that holds out nothing, or all, the document with the smallest hash is taken; of a single document,
its end.

`hash` is that of the whole index, which holds the hash of everything else: equal hashes are equal
tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ingot.core import log, paths
from ingot.core.errors import ConfigError, DataError
from ingot.data import shard, vocabulary
from ingot.data.shard import Shard, ShardFacts, Tokens
from ingot.data.source import Source
from ingot.data.vocabulary import Vocabulary

NAME = "data.json"
FORMAT = 1
VOCAB = 4096  # tokens of a vocabulary, unless somebody says
MAX_INDEX = 1 << 26
SHARD = 1 << 25  # tokens: 64 MB of two bytes each
BATCH = 1 << 22  # characters that are tokenized at a time
TRAINED_ON = 1 << 30  # bytes of text that a vocabulary is trained on, at most

Part = Literal["train", "validation"]


class Made(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a corpus is made of; the same again gives the same corpus.

    `tokenizer` is the hash of the tokenizer that was given, `vocab` the size of one to train.
    """

    source: str
    documents: int
    bytes: int
    field: str
    validation: float
    vocab: int | None
    tokenizer: str | None


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of data.json, `hash` excepted."""

    format: int
    made: Made
    tokenizer: str
    size: int
    end: int | None
    itemsize: int
    train: tuple[ShardFacts, ...]
    validation: tuple[ShardFacts, ...]

    def hash(self) -> str:
        """The hash of all of it."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


class Corpus:
    """The tokens in a directory that `prepare` or `ingot data` has made.

    `train` and `validation` are its parts, `size` is the number of ids of its vocabulary, `end`
    the one that ends a document. The directory has the files of its tokenizer, as a model's has.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.index = index = _read(directory / NAME)
        if vocabulary.digest(directory) != index.tokenizer:
            raise DataError(
                f"the tokenizer in {directory} is not the one that its tokens were made with",
                remedy="restore tokenizer.json, or delete the directory and make it again",
            )
        self.hash, self.size, self.end = index.hash(), index.size, index.end
        self.train, self.validation = self._part("train"), self._part("validation")

    def _part(self, part: Part) -> Tokens:
        facts = self.index.train if part == "train" else self.index.validation
        itemsize, size = self.index.itemsize, self.index.size
        found = [
            Shard(_shard_path(self.directory, part, number), one, itemsize, size)
            for number, one in enumerate(facts)
        ]
        return Tokens(found)


def prepare(
    source: Source,
    directory: Path,
    *,
    vocab: int | None = None,
    tokenizer: Path | None = None,
    validation: float = 0.01,
) -> Corpus:
    """Make a corpus of the source in the directory, or open it if it is there.

    The vocabulary is that of the model directory `tokenizer`, or else one of `vocab` tokens that
    is trained on the text, 4,096 by default. `validation` is the fraction that is held out.
    """
    wanted = _Wanted(source, vocab, tokenizer, validation)
    if (directory / NAME).exists():
        return wanted.found(Corpus(directory))
    with paths.whole_directory(directory) as temporary:
        wanted.write(temporary)
    return Corpus(directory)


@dataclass(frozen=True)
class _Wanted:
    """A corpus that was asked for."""

    source: Source
    vocab: int | None
    tokenizer: Path | None
    validation: float

    def __post_init__(self) -> None:
        if not 0 <= self.validation <= 0.5:
            raise ConfigError(f"{self.validation} held out for validation", remedy="give 0 to 0.5")
        if self.vocab is not None and self.tokenizer is not None:
            raise ConfigError(
                f"a vocabulary of {self.vocab} tokens and the tokenizer in {self.tokenizer}",
                remedy="give the size of one to train, or one that is there, but not both",
            )
        if self.tokenizer is None:
            vocabulary.check_size(self.size)
        else:
            Vocabulary.load(self.tokenizer)

    @property
    def size(self) -> int:
        return VOCAB if self.vocab is None else self.vocab

    def made(self, survey: _Survey) -> Made:
        tokenizer = self.tokenizer
        return Made(
            source=survey.sha256,
            documents=survey.documents,
            bytes=survey.bytes,
            field=self.source.field,
            validation=float(self.validation),  # 0 and 0.0 are spelled differently in JSON
            vocab=self.size if tokenizer is None else None,
            tokenizer=None if tokenizer is None else vocabulary.digest(tokenizer),
        )

    def write(self, directory: Path) -> None:
        survey = _survey(self.source, self.validation)
        if self.tokenizer is None:
            words = _train(self.source, survey, self.size)
            words.save(directory)
        else:
            words = Vocabulary.load(self.tokenizer)
            vocabulary.copy(self.tokenizer, directory)
        _write(self.source, survey, words, self.made(survey), directory)

    def found(self, corpus: Corpus) -> Corpus:
        made, there = self.made(_survey(self.source, self.validation)), corpus.index.made
        other = [k for k, v in msgspec.structs.asdict(made).items() if getattr(there, k) != v]
        if other:
            raise DataError(
                f"{corpus.directory} was made of something else: {', '.join(other)} differ",
                remedy="name another directory, or delete that one first",
            )
        return corpus


@dataclass
class _Survey:
    """What the first reading of a source found."""

    fraction: float
    documents: int = 0
    bytes: int = 0
    below: int = 0  # documents whose hash says that they are held out
    smallest: bytes = b"\xff" * 32
    sha256: str = ""

    def part(self, digest: bytes) -> Part:
        below = self._below(digest)
        if self.below in (0, self.documents):
            below = self.fraction > 0 and digest == self.smallest
        return "validation" if below else "train"

    def _below(self, digest: bytes) -> bool:
        return int.from_bytes(digest[:8], "big") < self.fraction * 2**64

    def add(self, digest: bytes, num_bytes: int) -> None:
        self.documents += 1
        self.bytes += num_bytes
        self.below += self._below(digest)
        self.smallest = min(self.smallest, digest)


def _survey(source: Source, fraction: float) -> _Survey:
    skipped: list[Path] = []
    found, whole = _Survey(fraction), hashlib.sha256()
    with log.progress("reading", source.size(), in_bytes=True) as bar:
        for text in source.documents(skipped.append):
            content = text.encode()
            digest = hashlib.sha256(content).digest()
            whole.update(digest)
            found.add(digest, len(content))
            bar.advance(len(content))
    if skipped:
        log.logger(__name__).warning(
            "passed over %d files that are not UTF-8 text, the first is %s",
            len(skipped),
            skipped[0],
        )
    if not found.documents:
        raise DataError(
            f"there is no text in {source.where}", remedy="name a source with documents in it"
        )
    found.sha256 = whole.hexdigest()
    return found


def _parts(source: Source, survey: _Survey) -> Iterator[tuple[Part, bytes, str]]:
    """The documents once more: where each goes, and its hash."""
    for text in source.documents(lambda path: None):
        digest = hashlib.sha256(text.encode()).digest()
        if survey.documents == 1 and survey.fraction:
            border = _border(text, survey.fraction)
            yield "train", digest, text[:border]
            yield "validation", b"", text[border:]
        else:
            yield survey.part(digest), digest, text


def _border(text: str, fraction: float) -> int:
    """Where the end that is held out begins: at a line, if there is one.

    >>> _border("one\\ntwo\\nthree\\n", 0.3), _border("word", 0.01)
    (8, 3)
    """
    wanted = min(int(len(text) * (1 - fraction)), len(text) - 1)
    return text.rfind("\n", 0, wanted) + 1 or max(wanted, 1)


def _train(source: Source, survey: _Survey, size: int) -> Vocabulary:
    share = min(1.0, TRAINED_ON / survey.bytes)
    with log.progress("training a vocabulary", survey.bytes, in_bytes=True) as bar:

        def documents() -> Iterator[str]:
            for part, digest, text in _parts(source, survey):
                bar.advance(len(text))
                # The last bytes of the hash: the first have decided which part it is.
                if part == "train" and int.from_bytes(digest[-8:], "big") < share * 2**64:
                    yield text
            bar.describe("merging pairs")

        return Vocabulary.train(documents(), size)


def _write(source: Source, survey: _Survey, words: Vocabulary, made: Made, directory: Path) -> None:
    itemsize = 2 if words.size <= 1 << 16 else 4
    writers: dict[Part, _Writer] = {
        "train": _Writer(directory, "train", itemsize),
        "validation": _Writer(directory, "validation", itemsize),
    }
    whole = hashlib.sha256()
    with log.progress("tokenizing", survey.bytes, in_bytes=True) as bar:
        for batch in _batches(_parts(source, survey)):
            for _, digest, _ in batch:
                whole.update(digest)
            encoded = words.encode([text for _, _, text in batch])
            for (part, _, text), tokens in zip(batch, encoded, strict=True):
                writers[part].add(tokens)
                bar.advance(len(text))
    if whole.hexdigest() != survey.sha256:
        raise DataError(
            f"{source.where} has changed while it was read", remedy="run it again when it is still"
        )
    shards = {part: writer.finish() for part, writer in writers.items()}
    if not shards["train"]:
        raise DataError(
            f"nothing is left to train on in {source.where}: all that is not held out is empty",
            remedy="give more documents, or --validation 0",
        )
    index = Index(
        format=FORMAT,
        made=made,
        tokenizer=vocabulary.digest(directory),
        size=words.size,
        end=words.end,
        itemsize=itemsize,
        train=shards["train"],
        validation=shards["validation"],
    )
    content = {"hash": index.hash(), **msgspec.to_builtins(index)}
    (directory / NAME).write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


def _batches(
    documents: Iterator[tuple[Part, bytes, str]],
) -> Iterator[list[tuple[Part, bytes, str]]]:
    """As many documents at a time as make `BATCH` characters."""
    batch: list[tuple[Part, bytes, str]] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document[2])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Writer:
    """Gathers documents and writes a shard whenever there are enough."""

    def __init__(self, directory: Path, part: Part, itemsize: int) -> None:
        self._directory, self._itemsize = directory, itemsize
        self._part: Part = part
        self._held: list[NDArray[Any]] = []
        self._size = 0
        self._done: list[ShardFacts] = []

    def add(self, tokens: list[int]) -> None:
        if tokens:
            self._held.append(np.array(tokens, dtype=f"<u{self._itemsize}"))
            self._size += len(tokens)
        if self._size >= SHARD:
            self._flush()

    def finish(self) -> tuple[ShardFacts, ...]:
        if self._held:
            self._flush()
        return tuple(self._done)

    def _flush(self) -> None:
        path = _shard_path(self._directory, self._part, len(self._done))
        self._done.append(shard.write(path, self._held, self._itemsize))
        self._held, self._size = [], 0


def _shard_path(directory: Path, part: Part, number: int) -> Path:
    return directory / f"{part}-{number:05}.tokens"


def _read(path: Path) -> Index:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_INDEX + 1)
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}",
            remedy="name a directory that `ingot data` has made",
        ) from error
    try:
        table = msgspec.json.decode(content[: MAX_INDEX + 1], type=dict[str, Any])
        claimed = table.pop("hash", None)
        if table.get("format") != FORMAT:
            raise DataError(
                f"{path} has format {table.get('format')}, this version of ingot knows {FORMAT}",
                remedy="make it again with this version: `ingot data`",
            )
        index = msgspec.convert(table, Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _broken(path, str(error)) from error
    if claimed != index.hash():
        raise _broken(path, "its content is not what was written")
    if index.itemsize not in (2, 4) or not 0 < index.size <= 1 << 31:
        raise _broken(path, f"tokens below {index.size} in {index.itemsize} bytes each")
    return index


def _broken(path: Path, why: str) -> DataError:
    return DataError(
        f"cannot read {path}: {why}",
        remedy=f"restore it, or delete {path.parent} and make it again with `ingot data`",
    )
