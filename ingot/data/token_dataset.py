"""Tokenized datasets: a directory with tokens, their tokenizer, and the inputs of the build.

    data.json               the index: source, settings, tokenizer, shards, all with their hashes
    tokenizer.json ...      the tokenizer, in the files that a model directory has
    train-00000.tokens      shards (`ingot.data.shard`)
    validation-00000.tokens

`tokenize` builds one. It reads the source once to count and to hash it (`ingot.data.source_scan`),
trains a tokenizer unless it is given one, and tokenizes. The directory appears when complete; an
existing directory that was built from the same inputs is reused.

`hash` is that of the whole index, which holds the hashes of all other files: datasets with equal
hashes have equal tokens.
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
MAX_INDEX_BYTES = 1 << 26
SHARD_TOKENS = 1 << 25  # 64 MB at two bytes per token
BATCH_BYTES = 1 << 21  # of text that are tokenized at a time
MAX_TRAINING_BYTES = 1 << 30  # of text that a tokenizer is trained on


class BuildInputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Inputs of a build, which determine the dataset.

    `tokenizer_sha256` is the hash of a given tokenizer, `vocab_size` the size of one to train.
    """

    source_sha256: str
    documents: int
    bytes: int
    field: str
    validation_fraction: float
    vocab_size: int | None
    tokenizer_sha256: str | None


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Content of data.json without its `hash`."""

    format: int
    build_inputs: BuildInputs
    tokenizer_sha256: str
    vocab_size: int
    eos_id: int | None
    itemsize: int
    train: tuple[ShardInfo, ...]
    validation: tuple[ShardInfo, ...]

    def hash(self) -> str:
        """Return the SHA-256 of the whole index."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()


class TokenDataset:
    """Tokens in a directory that `tokenize` or `ingot tokenize` has built.

    `train` and `validation` are its splits, `vocab_size` is the size of its vocabulary, `eos_id`
    the token that ends a document. The directory also has the files of the tokenizer.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.index = index = _read(directory / NAME)
        if tokenizer_files.digest(directory) != index.tokenizer_sha256:
            raise DataError(
                f"{directory}: the tokenizer is not the one that encoded the tokens",
                hint="restore tokenizer.json, or delete the directory and tokenize again",
            )
        self.hash, self.vocab_size, self.eos_id = index.hash(), index.vocab_size, index.eos_id
        self.train, self.validation = self._open_split("train"), self._open_split("validation")

    def _open_split(self, split: Split) -> TokenStream:
        infos = self.index.train if split == "train" else self.index.validation
        itemsize, vocab_size = self.index.itemsize, self.index.vocab_size
        shards = [
            Shard(_shard_path(self.directory, split, number), info, itemsize, vocab_size)
            for number, info in enumerate(infos)
        ]
        return TokenStream(shards)


def tokenize(
    source: Source,
    directory: Path,
    *,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    validation_fraction: float = 0.01,
) -> TokenDataset:
    """Tokenize a source into a directory, or open the directory if it exists.

    The tokenizer is that of the model directory `tokenizer`, or else one of `vocab_size` tokens
    that is trained on the text, 4,096 by default. `validation_fraction` of the documents are used
    for validation.
    """
    request = _BuildRequest(source, vocab_size, tokenizer, validation_fraction)
    if (directory / NAME).exists():
        return request.check(TokenDataset(directory))
    with paths.atomic_directory(directory) as temporary:
        request.write(temporary)
    return TokenDataset(directory)


@dataclass(frozen=True)
class _BuildRequest:
    """The arguments of `tokenize`."""

    source: Source
    vocab_size: int | None
    tokenizer: Path | None
    validation_fraction: float

    def __post_init__(self) -> None:
        if self.vocab_size is not None and self.tokenizer is not None:
            raise ConfigError(
                f"vocab_size and tokenizer exclude each other, got {self.vocab_size} and "
                f"{self.tokenizer}",
                hint="give a vocab_size to train a tokenizer, or an existing tokenizer",
            )
        if self.tokenizer is None:
            tokenizer_files.check_vocab_size(self.size)
        else:
            DocumentTokenizer.load(self.tokenizer)

    @property
    def size(self) -> int:
        return DEFAULT_VOCAB_SIZE if self.vocab_size is None else self.vocab_size

    def build_inputs(self, scan: SourceScan) -> BuildInputs:
        tokenizer = self.tokenizer
        return BuildInputs(
            source_sha256=scan.sha256,
            documents=scan.documents,
            bytes=scan.bytes,
            field=self.source.field,
            # A float, since JSON distinguishes 0 from 0.0.
            validation_fraction=float(self.validation_fraction),
            vocab_size=self.size if tokenizer is None else None,
            tokenizer_sha256=None if tokenizer is None else tokenizer_files.digest(tokenizer),
        )

    def write(self, directory: Path) -> None:
        scan = SourceScan.of(self.source, self.validation_fraction)
        if self.tokenizer is None:
            document_tokenizer = _train(scan, self.size)
            document_tokenizer.save(directory)
        else:
            document_tokenizer = DocumentTokenizer.load(self.tokenizer)
            tokenizer_files.copy_files(self.tokenizer, directory)
        _write(scan, document_tokenizer, self.build_inputs(scan), directory)

    def check(self, dataset: TokenDataset) -> TokenDataset:
        """Return an existing dataset if it was built from the same inputs."""
        inputs = self.build_inputs(SourceScan.of(self.source, self.validation_fraction))
        existing = dataset.index.build_inputs
        changed = [
            k for k, v in msgspec.structs.asdict(inputs).items() if getattr(existing, k) != v
        ]
        if changed:
            raise DataError(
                f"{dataset.directory}: built from other inputs, {', '.join(changed)} differ",
                hint="name another directory, or delete this one first",
            )
        return dataset


def _train(scan: SourceScan, size: int) -> DocumentTokenizer:
    fraction = min(1.0, MAX_TRAINING_BYTES / scan.bytes)
    with log.progress("training a tokenizer", scan.bytes, in_bytes=True) as bar:

        def documents() -> Iterator[str]:
            for document in scan.read():
                bar.advance(document.bytes)
                if document.split == "train" and document.is_sampled(fraction):
                    yield document.text
            bar.describe("merging pairs")

        return DocumentTokenizer.train(documents(), size)


def _write(
    scan: SourceScan, tokenizer: DocumentTokenizer, inputs: BuildInputs, directory: Path
) -> None:
    itemsize = 2 if tokenizer.vocab_size <= 1 << 16 else 4
    train = _ShardWriter(directory, "train", itemsize)
    validation = _ShardWriter(directory, "validation", itemsize)
    with log.progress("tokenizing", scan.bytes, in_bytes=True) as bar:
        for batch in _batches(scan.read()):
            encoded = tokenizer.encode([document.text for document in batch])
            for document, tokens in zip(batch, encoded, strict=True):
                writer = train if document.split == "train" else validation
                writer.add(tokens)
                bar.advance(document.bytes)
    index = Index(
        format=FORMAT,
        build_inputs=inputs,
        tokenizer_sha256=tokenizer_files.digest(directory),
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        itemsize=itemsize,
        train=train.finish(),
        validation=validation.finish(),
    )
    if not index.train:
        raise DataError(
            f"{scan.source.where}: no documents are left to train on",
            hint="give more documents, or --validation 0",
        )
    content = {"hash": index.hash(), **msgspec.to_builtins(index)}
    (directory / NAME).write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Yield lists of documents of about `BATCH_BYTES` each."""
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


class _ShardWriter:
    """Collects the documents of a split and writes shards of `SHARD_TOKENS`."""

    def __init__(self, directory: Path, split: Split, itemsize: int) -> None:
        self._directory, self._itemsize = directory, itemsize
        self._split: Split = split
        self._documents: list[NDArray[Any]] = []
        self._num_tokens = 0
        self._shards: list[ShardInfo] = []

    def add(self, tokens: list[int]) -> None:
        if tokens:
            self._documents.append(np.array(tokens, dtype=f"<u{self._itemsize}"))
            self._num_tokens += len(tokens)
        if self._num_tokens >= SHARD_TOKENS:
            self._flush()

    def finish(self) -> tuple[ShardInfo, ...]:
        if self._documents:
            self._flush()
        return tuple(self._shards)

    def _flush(self) -> None:
        path = _shard_path(self._directory, self._split, len(self._shards))
        self._shards.append(shard.write(path, self._documents, self._itemsize))
        self._documents, self._num_tokens = [], 0


def _shard_path(directory: Path, split: Split, number: int) -> Path:
    return directory / f"{split}-{number:05}.tokens"


def _read(path: Path) -> Index:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}",
            hint="name a directory that `ingot tokenize` has built",
        ) from error
    try:
        table = msgspec.json.decode(content[: MAX_INDEX_BYTES + 1], type=dict[str, Any])
        stored_hash = table.pop("hash", None)
        if table.get("format") != FORMAT:
            raise DataError(
                f"{path}: format must be {FORMAT}, got {table.get('format')}",
                hint="tokenize again with this version: `ingot tokenize`",
            )
        index = msgspec.convert(table, Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _read_error(path, str(error)) from error
    if stored_hash != index.hash():
        raise _read_error(path, "its hash does not match its content")
    if index.itemsize not in (2, 4) or not 0 < index.vocab_size <= 1 << 31:
        raise _read_error(
            path, f"vocab_size {index.vocab_size} at {index.itemsize} bytes per token"
        )
    return index


def _read_error(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path}: cannot be read: {reason}",
        hint=f"restore it, or delete {path.parent} and run `ingot tokenize` again",
    )
