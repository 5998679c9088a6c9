"""Conversations in samples of at most `seq_len` tokens, none of them cut.

Rows are encoded once, by a function that knows the tokenizer and its chat template
(`ingot.workflows.chat_data`), and stay in memory: five bytes for each token. Best-fit packing puts
several conversations in a sample (`ingot.data.best_fit`); each remains a sequence of its own:

    conversations   uuuuAAAA uuAA uuuAA         u: prompt, A: trained
    sample          uuuuAAAAuuAA
    targets         ---AAAA--AA-                -: IGNORE_INDEX
    lengths         8 4

A token's target is the next token of its conversation, if that one is trained.

Legend: N tokens of all conversations, T tokens of a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ingot.core import log
from ingot.core.errors import ConfigError, DataError, IngotError
from ingot.core.targets import IGNORE_INDEX
from ingot.data.best_fit import best_fit
from ingot.data.pack import MAX_LENGTH, TokenBatch
from ingot.data.row import Row

MAX_TOKENS = 1 << 32  # of all conversations, in memory
# Share of targets up to which the LM head is applied to their rows alone.
MAX_TARGET_SHARE = 0.9

EncodedSequence = tuple[list[int], list[bool]]
"""Tokens, and which of them are trained."""
EncodeRow = Callable[[Row], Sequence[EncodedSequence]]
"""Returns the sequences of a row."""


@dataclass(frozen=True)
class MaskedSequences:
    """Encoded conversations, one after the other.

    `tokens_N` are their tokens, `trained_N` says which are trained, `ends` where each of them ends.
    """

    tokens_N: NDArray[np.int32]
    trained_N: NDArray[np.bool_]
    ends: NDArray[np.int64]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each."""
        return np.diff(self.ends, prepend=0).tolist()

    def __getitem__(self, index: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Return the tokens of one, and which are trained."""
        part = slice(0 if index == 0 else self.ends[index - 1], self.ends[index])
        return self.tokens_N[part], self.trained_N[part]

    def __len__(self) -> int:
        return len(self.ends)

    def hash(self) -> str:
        """Return the SHA-256 of the tokens, the masks and the ends."""
        digest = hashlib.sha256()
        for array in (self.ends, self.tokens_N, self.trained_N):
            digest.update(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).data)
        return digest.hexdigest()


def encode_rows(
    rows: Iterable[Row], encode: EncodeRow, *, max_length: int, drop_long: bool = False
) -> MaskedSequences:
    """Encode rows; those of more than `max_length` tokens are an error, or dropped and counted."""
    samples = ((row.name, [sequence]) for row in rows for sequence in encode_row(row, encode))
    return join(samples, "conversations", max_length=max_length, drop_long=drop_long)


def join(
    samples: Iterable[tuple[str, Sequence[EncodedSequence]]],
    noun: str,
    *,
    max_length: int,
    drop_long: bool,
) -> MaskedSequences:
    """Join the sequences of all samples, each of which has a name for errors.

    Samples with a sequence of more than `max_length` tokens are an error, or dropped and counted.
    """
    tokens: list[NDArray[np.int32]] = []
    trained: list[NDArray[np.bool_]] = []
    dropped: list[tuple[int, str]] = []
    total = count = 0
    for name, sequences in samples:
        count += 1
        longest = max(len(ids) for ids, _ in sequences)
        if longest > max_length:
            dropped.append((longest, name))
            continue
        for ids, mask in sequences:
            tokens.append(np.array(ids, dtype=np.int32))
            trained.append(np.array(mask, dtype=np.bool_))
            total += len(ids)
        if total > MAX_TOKENS:
            raise DataError(
                f"{name}: all {noun} together must have at most {MAX_TOKENS:,} tokens",
                hint=f"train on a part of the {noun}",
            )
    if dropped:
        _report_long(dropped, count, noun, max_length, drop_long)
    if not tokens:
        raise DataError(
            f"no {noun} to train on, of {count}",
            hint=f"add {noun}, raise data.seq_len, or change the validation split",
        )
    ends = np.cumsum([len(part) for part in tokens], dtype=np.int64)
    return MaskedSequences(np.concatenate(tokens), np.concatenate(trained), ends)


def encode_row(row: Row, encode: EncodeRow) -> Sequence[EncodedSequence]:
    """Encode a row; raise an error that names it if that fails or if nothing would be trained."""
    try:
        encoded = encode(row)
    except IngotError as error:
        raise DataError(f"{row.name}: {error.message}", hint=error.hint) from error
    if not encoded or not all(any(mask) for _, mask in encoded):
        raise DataError(
            f"{row.name}: no token of it would be trained",
            hint="give it an assistant message after a user message, or remove it",
        )
    return encoded


def _report_long(
    dropped: list[tuple[int, str]], count: int, noun: str, max_length: int, drop_long: bool
) -> None:
    """Warn about samples that are too long, given by length and name, or raise an error."""
    longest, name = max(dropped)
    summary = (
        f"{len(dropped)} of {count} {noun} have more than {max_length:,} tokens; the longest has "
        f"{longest:,} ({name})"
    )
    if not drop_long:
        raise DataError(
            summary,
            hint=f"raise data.seq_len to {longest}, or leave them out with "
            'data.excess_length_strategy="drop"',
        )
    log.logger(__name__).warning("dropped: %s", summary)


class ChatDataset:
    """Samples of at most `seq_len` tokens, each of one or several whole conversations."""

    def __init__(self, sequences: MaskedSequences, seq_len: int) -> None:
        if not 0 < seq_len <= MAX_LENGTH:
            raise ConfigError(
                f"seq_len: must be from 1 to {MAX_LENGTH:,}, got {seq_len}",
                hint="give a sequence length in this range",
            )
        self.sequences, self.seq_len = sequences, seq_len
        self.samples = best_fit(sequences.lengths, seq_len)

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: Sequence[int]) -> TokenBatch:
        """Return the samples of these indices, packed in this order."""
        ids = list(indices)
        if ids and not 0 <= min(ids) <= max(ids) < len(self):
            raise IndexError(f"indices must be from 0 to {len(self) - 1}, got {ids}")
        parts = [self.sequences[number] for index in ids for number in self.samples[index]]
        tokens_T = np.concatenate([tokens for tokens, _ in parts]).astype(np.int64)
        targets_T = np.concatenate([next_targets(tokens, trained) for tokens, trained in parts])
        rows = np.flatnonzero(targets_T != IGNORE_INDEX)
        few = len(rows) <= MAX_TARGET_SHARE * len(targets_T)
        return TokenBatch(
            tokens=_tensor(tokens_T),
            targets=_tensor(targets_T),
            lengths=[len(tokens) for tokens, _ in parts],
            sample_ids=ids,
            target_rows=_tensor(rows) if few else None,
        )


def next_targets(tokens: NDArray[np.int32], trained: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the target of each token: the next one, if it is trained.

    >>> next_targets(np.array([5, 6, 7], np.int32), np.array([False, False, True]))
    array([-100,    7, -100])
    """
    targets = np.full(len(tokens), IGNORE_INDEX, dtype=np.int64)
    targets[:-1] = np.where(trained[1:], tokens[1:], IGNORE_INDEX)
    return targets


def _tensor(array: Any) -> torch.Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
