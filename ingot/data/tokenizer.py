"""The vocabulary that text is turned into tokens with: a model's, or one trained on the text.

A trained one is byte-level BPE (Sennrich et al. 2016, in GPT-2's form): the 256 bytes, so that
any text can be written, and the pairs that occur most often. Its token 0 is `<|endoftext|>`.

A document becomes what a server would make of it as a prompt, with the token that ends an answer
behind it, so that a model learns to begin as it will be asked to and to end at all. As there, the
name of a special token in the text becomes that token.
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
MIN_VOCAB_SIZE = 257  # the bytes and the end
MAX_VOCAB_SIZE = 1 << 20
_LONG = re.compile(r"\S{256}|\s{256}")
MAX_BYTES = 1 << 27
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class DocumentTokenizer:
    """Turns documents into tokens; `size` ids, of which `end` ends a document if there is one.

    >>> vocabulary = DocumentTokenizer.train(iter(["a rose is a rose"] * 2), 260)
    >>> vocabulary.vocab_size, vocabulary.eos_id, len(vocabulary.encode(["a rose"])[0])
    (260, 0, 4)
    """

    def __init__(self, inner: tokenizers.Tokenizer, eos_id: int | None) -> None:
        inner.no_truncation()  # a tokenizer.json may ask for either
        inner.no_padding()
        self._inner, self.eos_id = inner, eos_id
        self.vocab_size = 1 + max(inner.get_vocab().values(), default=0)
        if not 1 <= self.vocab_size <= 1 << 31:
            raise DataError(
                f"a vocabulary with an id of {self.vocab_size - 1}", hint="use another tokenizer"
            )

    @classmethod
    def train(cls, documents: Iterator[str], size: int) -> DocumentTokenizer:
        """A vocabulary of at most this many tokens for these documents."""
        check_size(size)
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        texts = (piece for document in documents for piece in _short_words(document))
        inner.train_from_iterator(texts, trainer)
        return cls(inner, inner.token_to_id(EOS))

    @classmethod
    def load(cls, directory: Path) -> DocumentTokenizer:
        """The vocabulary of a model directory, or of a directory that `save` wrote."""
        path = directory / FILES[0]
        content = _read(path)
        try:
            inner = tokenizers.Tokenizer.from_buffer(content)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise _broken(path, str(error)[:500]) from error
        name = _end_token(directory / FILES[1])
        return cls(inner, None if name is None else inner.token_to_id(name))

    def save(self, directory: Path) -> None:
        """Write it as a model directory has it."""
        # Not `save`: on a full disk its error is a bare Exception.
        (directory / FILES[0]).write_text(self._inner.to_str(pretty=True), "utf-8")
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
        (directory / FILES[1]).write_text(json.dumps(settings, indent=2) + "\n")

    def encode(self, documents: Sequence[str]) -> list[list[int]]:
        """The tokens of each document, its end included."""
        try:
            found = self._inner.encode_batch_fast(documents)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            raise DataError(
                f"the tokenizer failed: {str(error)[:500]}", hint="use another tokenizer"
            ) from error
        return [self._ended(encoding.ids) for encoding in found]

    def _ended(self, ids: list[int]) -> list[int]:
        if self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids.append(self.eos_id)
        return ids


def _short_words(text: str) -> Iterator[str]:
    """Cut the text inside of words that are too long to train on.

    A merge walks through the word that it is in: a megabyte without a space took three minutes.

    >>> [len(piece) for piece in _short_words("a word " + "x" * 600)]
    [263, 256, 88]
    """
    start = 0
    for match in _LONG.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


def check_size(size: int) -> None:
    """Refuse a vocabulary that cannot be trained."""
    if not MIN_VOCAB_SIZE <= size <= MAX_VOCAB_SIZE:
        raise ConfigError(
            f"a vocabulary of {size:,} tokens",
            hint=f"give {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE:,}",
        )


def copy_files(source: Path, directory: Path) -> None:
    """Copy the files of a vocabulary from a directory to another."""
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def digest(directory: Path) -> str:
    """The hash of the tokenizer in a directory."""
    return hashlib.sha256(_read(directory / FILES[0])).hexdigest()


def _end_token(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        found: Any = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise _broken(path, str(error)) from error
    if not isinstance(found, dict):
        raise _broken(path, "it is not an object")
    name = cast(dict[str, Any], found).get("eos_token")
    if isinstance(name, dict):  # as older versions of transformers write it
        name = cast(dict[str, Any], name).get("content")
    return name if isinstance(name, str) else None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise _broken(path, error.strerror or str(error)) from error
    if len(content) > MAX_BYTES:
        raise _broken(path, f"it is larger than {MAX_BYTES:,} bytes")
    return content


def _broken(path: Path, why: str) -> DataError:
    return DataError(
        f"cannot read {path}: {why}",
        hint="name a model directory with a tokenizer.json, or have one trained by --vocab-size",
    )
