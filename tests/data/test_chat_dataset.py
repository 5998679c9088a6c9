"""Conversations in samples: whole, masked, and errors that name the row."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError, DataError
from ingot.core.targets import IGNORE_INDEX
from ingot.data import ChatDataset, Loader, TextRow, encode_rows
from ingot.data.chat_dataset import EncodeRow, MaskedSequences

Sequences = list[tuple[list[int], list[bool]]]


def rows(count: int) -> list[TextRow]:
    return [
        TextRow(name=f"line {i}", digest=bytes([i]), prompt="", completion="") for i in range(count)
    ]


def encoding(sequences: Sequences) -> EncodeRow:
    return lambda row: [sequences[int(row.name.split()[1])]]


def encoded(sequences: Sequences, **options: Any) -> MaskedSequences:
    known = {"max_length": 100, **options}
    return encode_rows(rows(len(sequences)), encoding(sequences), **known)


@st.composite
def sequences(draw: st.DrawFn) -> Sequences:
    """Draw conversations whose tokens are all different."""
    lengths = draw(st.lists(st.integers(2, 20), min_size=1, max_size=12))
    found: Sequences = []
    for number, length in enumerate(lengths):
        mask = [False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))]
        mask[draw(st.integers(1, length - 1))] = True
        found.append(([100 * number + i for i in range(length)], mask))
    return found


@given(found=sequences())
def test_samples_hold_whole_conversations_and_the_targets_of_trained_tokens(
    found: Sequences,
) -> None:
    dataset = ChatDataset(encoded(found), seq_len=32)
    batch = dataset.batch(range(len(dataset)))
    targets = batch.targets.split(batch.lengths)
    by_first = {tokens[0]: (tokens, mask) for tokens, mask in found}
    for tokens, own in zip(batch.tokens.split(batch.lengths), targets, strict=True):
        whole, mask = by_first.pop(int(tokens[0]))
        assert tokens.tolist() == whole
        wanted = [t if trained else IGNORE_INDEX for t, trained in zip(whole, mask, strict=True)]
        assert own.tolist() == [*wanted[1:], IGNORE_INDEX]
    assert not by_first
    assert all(sum(dataset.batch([i]).lengths) <= 32 for i in range(len(dataset)))
    kept = torch.arange(len(batch.tokens)) if batch.target_rows is None else batch.target_rows
    assert set(np.flatnonzero(batch.targets != IGNORE_INDEX)) <= set(kept.tolist())


def test_rows_with_a_target_are_listed_if_they_are_few() -> None:
    tokens = list(range(20))
    few = ChatDataset(encoded([(tokens, [False] * 18 + [True] * 2)]), 20).batch([0])
    assert few.target_rows is not None
    assert few.target_rows.tolist() == [17, 18]
    assert few.to(torch.device("cpu")).target_rows is few.target_rows
    many = ChatDataset(encoded([(tokens, [False] + [True] * 19)]), 20).batch([0])
    assert many.target_rows is None


def test_a_loader_resumes_in_the_middle_of_an_epoch() -> None:
    found: Sequences = [([i, i + 1], [False, True]) for i in range(0, 60, 2)]
    dataset = ChatDataset(encoded(found), seq_len=4)
    loader, again = (Loader(dataset, batch_size=2, seed=3) for _ in range(2))
    for _ in range(5):
        next(loader)
    again.load_state_dict(loader.state_dict())
    assert next(again).tokens.equal(next(loader).tokens)


def test_the_hash_covers_tokens_masks_and_ends() -> None:
    base: Sequences = [([1, 2, 3], [False, True, True]), ([4, 5], [False, True])]
    others: list[Sequences] = [
        [([1, 2, 9], [False, True, True]), ([4, 5], [False, True])],
        [([1, 2, 3], [False, False, True]), ([4, 5], [False, True])],
        [([1, 2], [False, True]), ([3, 4, 5], [True, False, True])],
    ]
    assert encoded(base).hash() == encoded(list(base)).hash()
    assert len({encoded(other).hash() for other in [base, *others]}) == 4


def test_nothing_to_train_is_an_error_that_names_the_row() -> None:
    trained = ([1, 2], [False, True])
    with pytest.raises(DataError, match="line 1: no token of it would be trained"):
        encoded([trained, ([1, 2], [False, False])])
    with pytest.raises(DataError, match="line 0: no token of it would be trained"):
        encode_rows(rows(1), lambda row: [], max_length=4)
    with pytest.raises(DataError, match="no conversations to train on, of 0"):
        encoded([])


def test_errors_of_the_encoder_name_the_row() -> None:
    def fail(row: Any) -> Any:
        raise ConfigError("the template rejects it", hint="change it")

    with pytest.raises(DataError, match="line 0: the template rejects it") as caught:
        encode_rows(rows(1), fail, max_length=4)
    assert caught.value.hint == "change it"


def test_long_conversations_are_an_error_or_dropped_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = [(list(range(n)), [False] * (n - 1) + [True]) for n in (3, 9, 4, 12)]
    with pytest.raises(DataError, match="2 of 4 conversations have more than 8 tokens") as caught:
        encoded(found, max_length=8)
    assert "the longest has 12 (line 3)" in caught.value.message
    assert "data.seq_len to 12" in caught.value.hint
    with caplog.at_level(logging.WARNING, "ingot"):
        kept = encoded(found, max_length=8, drop_long=True)
    assert kept.lengths == [3, 4]
    assert "dropped: 2 of 4 conversations" in caplog.text


def test_bounds() -> None:
    kept = encoded([([1, 2], [False, True])])
    with pytest.raises(ConfigError, match="seq_len"):
        ChatDataset(kept, 0)
    with pytest.raises(IndexError, match="from 0 to 0"):
        ChatDataset(kept, 2).batch([1])
