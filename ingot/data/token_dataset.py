"""A corpus: a directory of tokens, with what they were made of.

    data.json               the index: source, settings, tokenizer, shards, all with their hashes
    tokenizer.json ...      the vocabulary, as a model directory has it
    train-00000.tokens      shards (`ingot.data.shard`)
    validation-00000.tokens

`tokenize` makes one. It reads the source once to count and to hash it (`ingot.data.source_scan`),
trains a vocabulary unless it is given one, and tokenizes. The directory appears when complete; a
directory that was built from the same inputs is opened as it is.

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
from ingot.data import shard
from ingot.data import tokenizer as tokenizer_files
from ingot.data.shard import Shard, ShardInfo, TokenStream
from ingot.data.source import Source
from ingot.data.source_scan import Document, SourceScan, Split
from ingot.data.tokenizer import DocumentTokenizer

NAME = "data.json"
FORMAT = 1
DEFAULT_VOCAB_SIZE = 4096  # of a trained tokenizer, by default
MAX_INDEX = 1 << 26
SHARD_TOKENS = 1 << 25  # tokens: 64 MB of two bytes each
BATCH_BYTES = 1 << 21  # bytes of text that are tokenized at a time
MAX_TRAINING_BYTES = 1 << 30  # bytes of text that a vocabulary is trained on, at most


class BuildInputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a corpus is made of; the same again gives the same corpus.

    `tokenizer` is the hash of the tokenizer that was given, `vocab` the size of one to train.
    """

    source_sha256: str
    documents: int
    bytes: int
    field: str
    validation_fraction: float
    vocab_size: int | None
    tokenizer_sha256: str | None


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of data.json, `hash` excepted."""

    format: int
    build_inputs: BuildInputs
    tokenizer_sha256: str
    vocab_size: int
    eos_id: int | None
    itemsize: int
    train: tuple[ShardInfo, ...]
    validation: tuple[ShardInfo, ...]

    def hash(self) -> str:
        """The hash of all of it."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


class TokenDataset:
    """The tokens in a directory that `tokenize` or `ingot tokenize` has made.

    `train` and `validation` are its splits, `vocab_size` is the size of its vocabulary, `eos_id`
    the token that ends a document. The directory also has the tokenizer's files, as a model's has.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.index = index = _read(directory / NAME)
        if tokenizer_files.digest(directory) != index.tokenizer_sha256:
            raise DataError(
                f"the tokenizer in {directory} is not the one that its tokens were made with",
                hint="restore tokenizer.json, or delete the directory and make it again",
            )
        self.hash, self.vocab_size, self.eos_id = index.hash(), index.vocab_size, index.eos_id
        self.train, self.validation = self._part("train"), self._part("validation")

    def _part(self, part: Split) -> TokenStream:
        facts = self.index.train if part == "train" else self.index.validation
        itemsize, size = self.index.itemsize, self.index.vocab_size
        found = [
            Shard(_shard_path(self.directory, part, number), one, itemsize, size)
            for number, one in enumerate(facts)
        ]
        return TokenStream(found)


def tokenize(
    source: Source,
    directory: Path,
    *,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    validation_fraction: float = 0.01,
) -> TokenDataset:
    """Make a corpus of the source in the directory, or open it if it is there.

    The vocabulary is that of the model directory `tokenizer`, or else one of `vocab` tokens that
    is trained on the text, 4,096 by default. `validation_fraction` is of the documents.
    """
    wanted = _BuildRequest(source, vocab_size, tokenizer, validation_fraction)
    if (directory / NAME).exists():
        return wanted.found(TokenDataset(directory))
    with paths.atomic_directory(directory) as temporary:
        wanted.write(temporary)
    return TokenDataset(directory)


@dataclass(frozen=True)
class _BuildRequest:
    """A corpus that was asked for."""

    source: Source
    vocab_size: int | None
    tokenizer: Path | None
    validation_fraction: float

    def __post_init__(self) -> None:
        if self.vocab_size is not None and self.tokenizer is not None:
            raise ConfigError(
                f"a vocabulary of {self.vocab_size} tokens and the tokenizer in {self.tokenizer}",
                hint="give the size of one to train, or one that is there, but not both",
            )
        if self.tokenizer is None:
            tokenizer_files.check_size(self.size)
        else:
            DocumentTokenizer.load(self.tokenizer)

    @property
    def size(self) -> int:
        return DEFAULT_VOCAB_SIZE if self.vocab_size is None else self.vocab_size

    def made(self, scan: SourceScan) -> BuildInputs:
        tokenizer = self.tokenizer
        return BuildInputs(
            source_sha256=scan.sha256,
            documents=scan.documents,
            bytes=scan.bytes,
            field=self.source.field,
            validation_fraction=float(
                self.validation_fraction
            ),  # 0 and 0.0 are spelled differently in JSON
            vocab_size=self.size if tokenizer is None else None,
            tokenizer_sha256=None if tokenizer is None else tokenizer_files.digest(tokenizer),
        )

    def write(self, directory: Path) -> None:
        scan = SourceScan.of(self.source, self.validation_fraction)
        if self.tokenizer is None:
            words = _train(scan, self.size)
            words.save(directory)
        else:
            words = DocumentTokenizer.load(self.tokenizer)
            tokenizer_files.copy_files(self.tokenizer, directory)
        _write(scan, words, self.made(scan), directory)

    def found(self, corpus: TokenDataset) -> TokenDataset:
        made = self.made(SourceScan.of(self.source, self.validation_fraction))
        there = corpus.index.build_inputs
        other = [k for k, v in msgspec.structs.asdict(made).items() if getattr(there, k) != v]
        if other:
            raise DataError(
                f"{corpus.directory} was made of something else: {', '.join(other)} differ",
                hint="name another directory, or delete that one first",
            )
        return corpus


def _train(scan: SourceScan, size: int) -> DocumentTokenizer:
    share = min(1.0, MAX_TRAINING_BYTES / scan.bytes)
    with log.progress("training a vocabulary", scan.bytes, in_bytes=True) as bar:

        def documents() -> Iterator[str]:
            for document in scan.read():
                bar.advance(document.bytes)
                if document.part == "train" and document.chosen(share):
                    yield document.text
            bar.describe("merging pairs")

        return DocumentTokenizer.train(documents(), size)


def _write(scan: SourceScan, words: DocumentTokenizer, made: BuildInputs, directory: Path) -> None:
    itemsize = 2 if words.vocab_size <= 1 << 16 else 4
    train = _Writer(directory, "train", itemsize)
    validation = _Writer(directory, "validation", itemsize)
    with log.progress("tokenizing", scan.bytes, in_bytes=True) as bar:
        for batch in _batches(scan.read()):
            encoded = words.encode([document.text for document in batch])
            for document, tokens in zip(batch, encoded, strict=True):
                writer = train if document.part == "train" else validation
                writer.add(tokens)
                bar.advance(document.bytes)
    index = Index(
        format=FORMAT,
        build_inputs=made,
        tokenizer_sha256=tokenizer_files.digest(directory),
        vocab_size=words.vocab_size,
        eos_id=words.eos_id,
        itemsize=itemsize,
        train=train.finish(),
        validation=validation.finish(),
    )
    if not index.train:
        raise DataError(
            f"nothing is left to train on in {scan.source.where}",
            hint="give more documents, or --validation 0",
        )
    content = {"hash": index.hash(), **msgspec.to_builtins(index)}
    (directory / NAME).write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """As many documents at a time as make `BATCH_BYTES` bytes."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.bytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Writer:
    """Gathers documents and writes a shard whenever there are enough."""

    def __init__(self, directory: Path, part: Split, itemsize: int) -> None:
        self._directory, self._itemsize = directory, itemsize
        self._part: Split = part
        self._held: list[NDArray[Any]] = []
        self._size = 0
        self._done: list[ShardInfo] = []

    def add(self, tokens: list[int]) -> None:
        if tokens:
            self._held.append(np.array(tokens, dtype=f"<u{self._itemsize}"))
            self._size += len(tokens)
        if self._size >= SHARD_TOKENS:
            self._flush()

    def finish(self) -> tuple[ShardInfo, ...]:
        if self._held:
            self._flush()
        return tuple(self._done)

    def _flush(self) -> None:
        path = _shard_path(self._directory, self._part, len(self._done))
        self._done.append(shard.write(path, self._held, self._itemsize))
        self._held, self._size = [], 0


def _shard_path(directory: Path, part: Split, number: int) -> Path:
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
    if index.itemsize not in (2, 4) or not 0 < index.vocab_size <= 1 << 31:
        raise _broken(path, f"tokens below {index.vocab_size} in {index.itemsize} bytes each")
    return index


def _broken(path: Path, why: str) -> DataError:
    return DataError(
        f"cannot read {path}: {why}",
        hint=f"restore it, or delete {path.parent} and make it again with `ingot tokenize`",
    )
