"""Preference pairs: a prompt, and two answers of which one is preferred.

    {"prompt": "What is 2 + 2?", "chosen": " 4", "rejected": " 5"}               text
    {"prompt": [...], "chosen": [...], "rejected": [...]}                        messages
    {"chosen": [...], "rejected": [...]}     conversations that begin alike: that is the prompt

Both answers are encoded with the prompt, as two sequences; the tokens of the answers are trained
(`ingot.data.row` describes messages and text). A sample is a pair, so that both are always in one
micro-batch:

    batch       uuuCCC uuuRRRRR uuCC uuRRR        u: prompt, C: chosen, R: rejected
    lengths     6 8 4 5
    num_targets 3 5 2 3

Legend: N targets of a batch, T its tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ingot.core.errors import DataError
from ingot.core.targets import IGNORE_INDEX
from ingot.data.chat_dataset import (
    EncodedSequence,
    EncodeRow,
    MaskedSequences,
    encode_row,
    join,
    next_targets,
)
from ingot.data.pack import TokenBatch
from ingot.data.row import KEYS, Record, Row, parse_row, read_records
from ingot.data.transfer import copy_to_device

PAIR_KEYS = (*KEYS, "chosen", "rejected")


@dataclass(frozen=True, kw_only=True)
class PairRow:
    """Two answers to the same prompt, each as a row of its own."""

    name: str
    digest: bytes
    chosen: Row
    rejected: Row


def read_pairs(where: str | Path) -> Iterator[PairRow]:
    """Yield the pairs of a .jsonl, .parquet or .arrow file, or of all such files in a folder."""
    return (parse_pair(record, name) for name, record in read_records(where, PAIR_KEYS))


def parse_pair(record: Any, name: str) -> PairRow:
    """Return the pair of a JSON object; `name` is where it is, for errors.

    >>> pair = parse_pair({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}, "line 1")
    >>> pair.chosen.completion, pair.rejected.completion
    (' 4', ' 5')
    """
    fields = cast(Record, record) if isinstance(record, dict) else {}
    prompt, answers = fields.get("prompt"), [fields.get(key) for key in ("chosen", "rejected")]
    is_text = all(isinstance(answer, str) for answer in answers)
    is_chat = all(isinstance(answer, list) for answer in answers)
    if prompt is None and is_chat:
        prompt, answers = _split_prompt(*cast(list[list[Any]], answers))
    if not ((is_text and isinstance(prompt, str)) or (is_chat and isinstance(prompt, list))):
        raise DataError(
            f"{name}: not a preference pair",
            hint="give it prompt, chosen and rejected: three texts or three lists of messages",
        )
    if answers[0] == answers[1]:
        raise DataError(f"{name}: chosen and rejected are equal", hint="remove the row")
    rows = [
        parse_row({"prompt": prompt, "completion": answer, "tools": fields.get("tools")}, name)
        for answer in answers
    ]
    digest = hashlib.sha256(rows[0].digest + rows[1].digest).digest()
    return PairRow(name=name, digest=digest, chosen=rows[0], rejected=rows[1])


def _split_prompt(chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the messages that both begin with, and the rest of each.

    >>> _split_prompt([1, 2, 3], [1, 2, 4])
    ([1, 2], [[3], [4]])
    """
    same = 0
    while same < min(len(chosen), len(rejected)) and chosen[same] == rejected[same]:
        same += 1
    return chosen[:same], [chosen[same:], rejected[same:]]


def encode_pairs(
    pairs: Iterable[PairRow], encode: EncodeRow, *, max_length: int, drop_long: bool = False
) -> MaskedSequences:
    """Encode pairs: the sequence of the chosen answer, then that of the rejected one, and so on.

    Pairs of which one has more than `max_length` tokens are an error or dropped and counted.
    """
    samples = (
        (pair.name, [_encode_answer(row, encode) for row in (pair.chosen, pair.rejected)])
        for pair in pairs
    )
    return join(samples, "pairs", max_length=max_length, drop_long=drop_long)


def _encode_answer(row: Row, encode: EncodeRow) -> EncodedSequence:
    sequences = encode_row(row, encode)
    if len(sequences) != 1:
        raise DataError(
            f"{row.name}: the chat template renders the turns of an answer as "
            f"{len(sequences)} sequences",
            hint="give answers of one assistant message",
        )
    return sequences[0]


@dataclass(frozen=True)
class PairBatch(TokenBatch):
    """Pairs, packed: the chosen and the rejected sequence of the first, then of the second, ..."""

    num_targets: list[int] = field(default_factory=list[int])
    """Targets of each sequence; `target_rows` lists them all."""
    reference: Tensor | None = None
    """Log-probability of each target under the reference model, (N,) of float32."""

    def to(self, device: torch.device) -> PairBatch:
        """Return the batch on a device; the lists stay on the host."""
        moved = super().to(device)
        assert isinstance(moved, PairBatch)
        if self.reference is None:
            return moved
        (reference,) = copy_to_device(device, self.reference)
        return replace(moved, reference=reference)


class PairDataset:
    """Preference pairs; `sequences` alternates between chosen and rejected ones.

    >>> pair = parse_pair({"prompt": "a", "chosen": "b", "rejected": "cd"}, "line 1")
    >>> def encode(row):  # a token for each character
    ...     text = row.prompt + row.completion
    ...     return [([ord(c) for c in text], [i >= len(row.prompt) for i in range(len(text))])]
    >>> dataset = PairDataset(encode_pairs([pair], encode, max_length=8))
    >>> dataset.batch([0]).lengths, dataset.batch([0]).num_targets
    ([2, 3], [1, 2])
    """

    def __init__(self, sequences: MaskedSequences) -> None:
        self.sequences = sequences
        trained = np.concatenate([[0], np.cumsum(sequences.trained_N)])
        self.reference_ends = trained[sequences.ends]
        """Where the targets of each sequence end, among those of all."""
        self.reference: NDArray[np.float32] | None = None
        """Log-probabilities of the targets of all sequences under the reference model."""

    def __len__(self) -> int:
        return len(self.sequences) // 2

    def batch(self, indices: Sequence[int]) -> PairBatch:
        """Return the pairs of these indices, packed in this order."""
        ids = list(indices)
        if ids and not 0 <= min(ids) <= max(ids) < len(self):
            raise IndexError(f"indices must be from 0 to {len(self) - 1}, got {ids}")
        numbers = [2 * index + answer for index in ids for answer in (0, 1)]
        parts = [self.sequences[number] for number in numbers]
        targets_T = np.concatenate([next_targets(*part) for part in parts])
        return PairBatch(
            tokens=_tensor(np.concatenate([tokens for tokens, _ in parts]).astype(np.int64)),
            targets=_tensor(targets_T),
            lengths=[len(tokens) for tokens, _ in parts],
            sample_ids=ids,
            target_rows=_tensor(np.flatnonzero(targets_T != IGNORE_INDEX)),
            num_targets=[int(trained.sum()) for _, trained in parts],
            reference=self._reference(numbers),
        )

    def _reference(self, numbers: list[int]) -> Tensor | None:
        if self.reference is None:
            return None
        starts = [0 if number == 0 else self.reference_ends[number - 1] for number in numbers]
        ends = [self.reference_ends[number] for number in numbers]
        parts = [self.reference[a:b] for a, b in zip(starts, ends, strict=True)]
        return _tensor(np.concatenate(parts))


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]
