"""The tokenizer of documents: that of a model, or one trained on the text.

A trained tokenizer is byte-level BPE (Sennrich et al. 2016, in GPT-2's form): the 256 bytes, so
that any text can be encoded, and merges of the most frequent pairs. Its token 0 is `<|endoftext|>`.

A document is tokenized as a server would tokenize it as a prompt, followed by the end-of-sequence
token. So a model is trained on the prefixes that it will be given, and learns to end. As in a
prompt, the name of a special token in the text becomes that token.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ingot.core.errors import ConfigError, DataError

EOS = "<|endoftext|>"
MIN_VOCAB_SIZE = 257  # the bytes and EOS
MAX_VOCAB_SIZE = 1 << 20
_LONG_WORD = re.compile(r"\S{256}|\s{256}")
MAX_BYTES = 1 << 27  # of a file
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class DocumentTokenizer:
    """Encodes documents to `vocab_size` token ids; `eos_id`, if not None, ends a document.

    >>> tokenizer = DocumentTokenizer.train(iter(["a rose is a rose"] * 2), 260)
    >>> tokenizer.vocab_size, tokenizer.eos_id, len(tokenizer.encode(["a rose"])[0])
    (260, 0, 4)
    """

    def __init__(self, inner: tokenizers.Tokenizer, eos_id: int | None) -> None:
        inner.no_truncation()  # a tokenizer.json may enable either
        inner.no_padding()
        self._inner, self.eos_id = inner, eos_id
        self.vocab_size = 1 + max(inner.get_vocab().values(), default=0)
        if not 1 <= self.vocab_size <= 1 << 31:
            raise DataError(
                f"tokenizer: ids must be below {1 << 31:,}, got {self.vocab_size - 1:,}",
                hint="use another tokenizer",
            )

    @classmethod
    def train(cls, documents: Iterator[str], size: int) -> DocumentTokenizer:
        """Train a tokenizer with at most `size` tokens on the documents."""
        check_vocab_size(size)
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        texts = (text for document in documents for text in _split_long_words(document))
        inner.train_from_iterator(texts, trainer)
        return cls(inner, inner.token_to_id(EOS))

    @classmethod
    def load(cls, directory: Path) -> DocumentTokenizer:
        """Load the tokenizer of a model directory, or one that `save` wrote."""
        path = directory / FILES[0]
        content = _read(path)
        try:
            inner = tokenizers.Tokenizer.from_buffer(content)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise _read_error(path, str(error)[:500]) from error
        name = _read_eos_token(directory / FILES[1])
        return cls(inner, None if name is None else inner.token_to_id(name))

    def save(self, directory: Path) -> None:
        """Write the files that a model directory has."""
        # Not the tokenizer's own `save`: on a full disk it raises a bare Exception.
        (directory / FILES[0]).write_text(self._inner.to_str(pretty=True), "utf-8")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
        (directory / FILES[1]).write_text(json.dumps(settings, indent=2) + "\n")

    def encode(self, documents: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each document, including EOS."""
        try:
            encodings = self._inner.encode_batch_fast(documents)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise DataError(
                f"tokenizer: encoding failed: {str(error)[:500]}", hint="use another tokenizer"
            ) from error
        return [self._append_eos(encoding.ids) for encoding in encodings]

    def _append_eos(self, ids: list[int]) -> list[int]:
        if self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids


def _split_long_words(text: str) -> Iterator[str]:
    """Split the text inside words that are too long to train on.

    A merge scans the whole word it is in: a megabyte without a space took three minutes.

    >>> [len(part) for part in _split_long_words("a word " + "x" * 600)]
    [263, 256, 88]
    """
    start = 0
    for match in _LONG_WORD.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


def check_vocab_size(size: int) -> None:
    """Raise a `ConfigError` if no tokenizer of this size can be trained."""
    if not MIN_VOCAB_SIZE <= size <= MAX_VOCAB_SIZE:
        raise ConfigError(
            f"vocab_size: must be from {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE:,}, got {size:,}",
            hint=f"give {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE:,}",
        )


def copy_files(source: Path, directory: Path) -> None:
    """Copy the files of a tokenizer from one directory to another."""
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def digest(directory: Path) -> str:
    """Return the SHA-256 of the tokenizer in a directory."""
    return hashlib.sha256(_read(directory / FILES[0])).hexdigest()


def _read_eos_token(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        settings: Any = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise _read_error(path, str(error)) from error
    if not isinstance(settings, dict):
        raise _read_error(path, "not a JSON object")
    name = cast(dict[str, Any], settings).get("eos_token")
    if isinstance(name, dict):  # as older versions of transformers write it
        name = cast(dict[str, Any], name).get("content")
    return name if isinstance(name, str) else None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _read_error(path, error.strerror or str(error)) from error
    if len(content) > MAX_BYTES:
        raise _read_error(path, f"larger than {MAX_BYTES:,} bytes")
    return content


def _read_error(path: Path, reason: str) -> DataError:
    return DataError(
        f"{path}: cannot be read: {reason}",
        hint="name a model directory with a tokenizer.json, or train one with --vocab-size",
    )
