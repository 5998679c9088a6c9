"""A corpus: a directory of tokens, with what they were made of.

    data.json               the index: source, settings, tokenizer, shards, all with their hashes
    tokenizer.json ...      the vocabulary, as a model directory has it
    train-00000.tokens      shards (`ingot.data.shard`)
    validation-00000.tokens

`prepare` makes one. It reads the source once to count and to hash it (`ingot.data.survey`), trains
a vocabulary unless it is given one, and tokenizes. The directory appears when all of it is there;
if it is there already and made of the same, it is taken as it is.

`hash` is that of the whole index, which holds the hash of everything else: equal hashes are equal
tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ingot.core import log, paths
from ingot.core.errors import ConfigError, DataError
from ingot.data import shard, vocabulary
from ingot.data.shard import Shard, ShardFacts, Tokens
from ingot.data.source import Source
from ingot.data.survey import Document, Part, Survey
from ingot.data.vocabulary import Vocabulary

NAME = "data.json"
FORMAT = 1
VOCAB = 4096  # tokens of a vocabulary, unless somebody says
MAX_INDEX = 1 << 26
SHARD = 1 << 25  # tokens: 64 MB of two bytes each
BATCH = 1 << 21  # bytes of text that are tokenized at a time
TRAINED_ON = 1 << 30  # bytes of text that a vocabulary is trained on, at most


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
    """The tokens in a directory that `prepare` or `ingot tokenize` has made.

    `train` and `validation` are its parts, `size` is the number of ids of its vocabulary, `end`
    the one that ends a document. The directory has the files of its tokenizer, as a model's has.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.index = index = _read(directory / NAME)
        if vocabulary.digest(directory) != index.tokenizer:
            raise DataError(
                f"the tokenizer in {directory} is not the one that its tokens were made with",
                hint="restore tokenizer.json, or delete the directory and make it again",
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
    with paths.atomic_directory(directory) as temporary:
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
        if self.vocab is not None and self.tokenizer is not None:
            raise ConfigError(
                f"a vocabulary of {self.vocab} tokens and the tokenizer in {self.tokenizer}",
                hint="give the size of one to train, or one that is there, but not both",
            )
        if self.tokenizer is None:
            vocabulary.check_size(self.size)
        else:
            Vocabulary.load(self.tokenizer)

    @property
    def size(self) -> int:
        return VOCAB if self.vocab is None else self.vocab

    def made(self, survey: Survey) -> Made:
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
        survey = Survey.of(self.source, self.validation)
        if self.tokenizer is None:
            words = _train(survey, self.size)
            words.save(directory)
        else:
            words = Vocabulary.load(self.tokenizer)
            vocabulary.copy(self.tokenizer, directory)
        _write(survey, words, self.made(survey), directory)

    def found(self, corpus: Corpus) -> Corpus:
        made = self.made(Survey.of(self.source, self.validation))
        there = corpus.index.made
        other = [k for k, v in msgspec.structs.asdict(made).items() if getattr(there, k) != v]
        if other:
            raise DataError(
                f"{corpus.directory} was made of something else: {', '.join(other)} differ",
                hint="name another directory, or delete that one first",
            )
        return corpus


def _train(survey: Survey, size: int) -> Vocabulary:
    share = min(1.0, TRAINED_ON / survey.bytes)
    with log.progress("training a vocabulary", survey.bytes, in_bytes=True) as bar:

        def documents() -> Iterator[str]:
            for document in survey.read():
                bar.advance(document.bytes)
                if document.part == "train" and document.chosen(share):
                    yield document.text
            bar.describe("merging pairs")

        return Vocabulary.train(documents(), size)


def _write(survey: Survey, words: Vocabulary, made: Made, directory: Path) -> None:
    itemsize = 2 if words.size <= 1 << 16 else 4
    train = _Writer(directory, "train", itemsize)
    validation = _Writer(directory, "validation", itemsize)
    with log.progress("tokenizing", survey.bytes, in_bytes=True) as bar:
        for batch in _batches(survey.read()):
            encoded = words.encode([document.text for document in batch])
            for document, tokens in zip(batch, encoded, strict=True):
                writer = train if document.part == "train" else validation
                writer.add(tokens)
                bar.advance(document.bytes)
    index = Index(
        format=FORMAT,
        made=made,
        tokenizer=vocabulary.digest(directory),
        size=words.size,
        end=words.end,
        itemsize=itemsize,
        train=train.finish(),
        validation=validation.finish(),
    )
    if not index.train:
        raise DataError(
            f"nothing is left to train on in {survey.source.where}",
            hint="give more documents, or --validation 0",
        )
    content = {"hash": index.hash(), **msgspec.to_builtins(index)}
    (directory / NAME).write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """As many documents at a time as make `BATCH` bytes."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.bytes
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
            hint="name a directory that `ingot tokenize` has made",
        ) from error
    try:
        table = msgspec.json.decode(content[: MAX_INDEX + 1], type=dict[str, Any])
        claimed = table.pop("hash", None)
        if table.get("format") != FORMAT:
            raise DataError(
                f"{path} has format {table.get('format')}, this version of ingot knows {FORMAT}",
                hint="make it again with this version: `ingot tokenize`",
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
        hint=f"restore it, or delete {path.parent} and make it again with `ingot tokenize`",
    )
