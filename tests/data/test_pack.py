from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError, DataError
from ingot.core.targets import IGNORE_INDEX
from ingot.data.loader import Loader
from ingot.data.pack import PackedDataset
from ingot.data.shard import TokenStream
from ingot.nn import BatchLayout
from tests.data.token_files import DOCUMENTS, tokens

LENGTHS = st.integers(1, 30)


@given(documents=DOCUMENTS, per_shard=st.integers(1, 5), length=LENGTHS, seed=st.integers(0, 99))
def test_an_epoch_has_every_token_once_with_its_successor(
    documents: list[list[int]], per_shard: int, length: int, seed: int
) -> None:
    """Every token has a number of its own, so that they can be distinguished."""
    numbers = iter(range(1 << 16))
    documents = [[next(numbers) for _ in document] for document in documents]
    successors = {
        token: after
        for document in documents
        for token, after in zip(document, [*document[1:], IGNORE_INDEX], strict=True)
    }
    with tempfile.TemporaryDirectory() as directory:
        packed = PackedDataset(tokens(Path(directory), documents, per_shard), length)
        loader = Loader(packed, batch_size=1, seed=seed)
        batches = [next(loader) for _ in range(len(packed))]
    found = {
        token: target
        for batch in batches
        for token, target in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True)
    }
    assert found == successors
    assert sum(len(batch.tokens) for batch in batches) == len(successors)
    sizes = sorted(len(batch.tokens) for batch in batches)
    assert sizes[1:] == [length] * (len(batches) - 1)


@given(documents=DOCUMENTS, per_shard=st.integers(1, 5), length=LENGTHS, data=st.data())
def test_a_sequence_is_the_longest_possible_part_of_a_document(
    documents: list[list[int]], per_shard: int, length: int, data: st.DataObject
) -> None:
    owners = {}
    for owner, document in enumerate(documents):
        for place in range(len(document)):
            owners[len(owners)] = (owner, place)
    numbered = iter(range(len(owners)))
    documents = [[next(numbered) for _ in document] for document in documents]
    with tempfile.TemporaryDirectory() as directory:
        packed = PackedDataset(tokens(Path(directory), documents, per_shard), length)
        ids = data.draw(st.lists(st.integers(0, len(packed) - 1), min_size=1, max_size=4))
        batch = packed.batch(ids)
    assert batch.sample_ids == ids
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert len(batch.tokens) == len(batch.targets) == sum(batch.lengths)
    pieces = torch.split(batch.tokens, batch.lengths)
    for piece in pieces:
        owner, place = owners[int(piece[0])]
        assert [owners[int(t)] for t in piece] == [(owner, place + i) for i in range(len(piece))]
        # It begins where a document or a sample does, and ends likewise.
        first, last = int(piece[0]), int(piece[-1])
        assert place == 0 or first % length == 0
        assert last == documents[owner][-1] or (last + 1) % length == 0
    assert BatchLayout.packed(batch.lengths).positions.tolist() == [
        i for piece in pieces for i in range(len(piece))
    ]


def test_the_example_of_the_page(tmp_path: Path) -> None:
    packed = PackedDataset(tokens(tmp_path, [[1] * 10, [2] * 3, [3] * 8], 2), 8)
    assert [packed.batch([i]).lengths for i in range(3)] == [[8], [2, 3, 3], [5]]
    assert packed.batch([1]).targets.tolist() == [1, IGNORE_INDEX, 2, 2, IGNORE_INDEX, 3, 3, 3]
    assert packed.batch([1, 0]).lengths == [2, 3, 3, 8]


def test_no_tokens_have_a_hint() -> None:
    with pytest.raises(DataError) as caught:
        PackedDataset(TokenStream([]), 8)
    assert "--validation" in caught.value.hint


@pytest.mark.parametrize("length", [0, -1, 1 << 30])
def test_an_invalid_length_is_rejected(tmp_path: Path, length: int) -> None:
    with pytest.raises(ConfigError):
        PackedDataset(tokens(tmp_path, [[1]], 1), length)


def test_a_sample_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(IndexError):
        PackedDataset(tokens(tmp_path, [[1, 2, 3]], 1), 2).batch([2])
