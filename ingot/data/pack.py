"""Packing: documents in samples of `seq_len` tokens, without padding.

The documents of a corpus lie one after another, and sample i is the tokens from i * length to
(i + 1) * length. What of a document is in a sample is a sequence of its own: attention does not
reach over its borders and positions begin at 0 (`BatchLayout.packed(lengths)`). So every token is
in exactly one sample, where it is has not to be stored, and a batch of samples is simply longer:

    documents   aaaaaaaaaabbbcccccccc        length 8
    samples     aaaaaaaa | aabbbccc | ccccc
    lengths     8          2 3 3      5

Each token's target is the next one in its document, even where that is in the next sample; the
last token of a document has none, which is `IGNORE_INDEX`. The last sample is shorter.

Combining parts of many documents so that fewer are cut ("best fit") would need an index of all
parts in memory; with windows, a document of k tokens is cut about k / length times whatever one
does.

Legend: T tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ingot.core.errors import ConfigError, DataError
from ingot.core.targets import IGNORE_INDEX
from ingot.data.shard import Ints, TokenStream
from ingot.data.transfer import copy_to_device

MAX_LENGTH = 1 << 24


@dataclass(frozen=True)
class TokenBatch:
    """Packed sequences: `tokens` and `targets` are (T,) of int64, `lengths` add up to T."""

    tokens: Tensor
    targets: Tensor
    lengths: list[int]
    sample_ids: list[int]
    target_rows: Tensor | None = None
    """Indices of the targets that are not ignored, if they are few; None otherwise."""

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch on a device; `lengths` and `sample_ids` stay on the host."""
        tokens, targets = copy_to_device(device, self.tokens, self.targets)
        if self.target_rows is None:
            return replace(self, tokens=tokens, targets=targets)
        (rows,) = copy_to_device(device, self.target_rows)
        return replace(self, tokens=tokens, targets=targets, target_rows=rows)


class PackedDataset:
    """Samples of `seq_len` tokens: `PackedDataset(token_dataset.train, seq_len=512)`."""

    def __init__(self, tokens: TokenStream, seq_len: int) -> None:
        if not 0 < seq_len <= MAX_LENGTH:
            raise ConfigError(
                f"seq_len: must be from 1 to {MAX_LENGTH:,}, got {seq_len}",
                hint="give a sequence length in this range",
            )
        if not len(tokens):
            raise DataError(
                "the split has no tokens",
                hint="tokenize more documents, or use `ingot tokenize --validation 0.1`",
            )
        self._tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return -(-len(self._tokens) // self.seq_len)

    def batch(self, indices: Sequence[int]) -> TokenBatch:
        """Return the samples of these indices, packed in this order."""
        ids = list(indices)
        samples = [self._sample(i) for i in ids]
        return TokenBatch(
            tokens=_joined([tokens_T for tokens_T, _, _ in samples]),
            targets=_joined([targets_T for _, targets_T, _ in samples]),
            lengths=[length for _, _, lengths in samples for length in lengths],
            sample_ids=ids,
        )

    def _sample(self, index: int) -> tuple[Ints, Ints, list[int]]:
        if not 0 <= index < len(self):
            raise IndexError(f"index must be from 0 to {len(self) - 1}, got {index}")
        start = index * self.seq_len
        stop = min(start + self.seq_len, len(self._tokens))
        # One token more, if there is one: the target of the last.
        tokens, ends = self._tokens.read(start, min(stop + 1, len(self._tokens)))
        num_tokens = stop - start
        ends = ends[ends <= num_tokens]
        targets_T = np.full(num_tokens, IGNORE_INDEX)
        targets_T[: len(tokens) - 1] = tokens[1:]
        targets_T[ends - 1] = IGNORE_INDEX
        borders: list[int] = np.union1d(ends, (0, num_tokens)).tolist()
        lengths = [after - before for before, after in pairwise(borders)]
        return tokens[:num_tokens], targets_T, lengths


def _joined(parts: list[Ints]) -> Tensor:
    joined: Any = np.concatenate(parts)
    return torch.from_numpy(joined)  # pyright: ignore[reportUnknownMemberType]
