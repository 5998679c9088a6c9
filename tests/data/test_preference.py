"""Preference pairs: rows, sequences and batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ingot.core.errors import DataError
from ingot.data import ChatRow, PairDataset, Row, TextRow, encode_pairs, read_pairs, split_rows
from ingot.data.preference import parse_pair

USER = {"role": "user", "content": "Hi"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("Hello!", "What?"))


def encode(row: Row) -> list[tuple[list[int], list[bool]]]:
    """A token for each character; the completion is trained."""
    assert isinstance(row, TextRow)
    text = row.prompt + row.completion
    return [([ord(c) for c in text], [i >= len(row.prompt) for i in range(len(text))])]


def pair(prompt: str, chosen: str, rejected: str) -> Any:
    return parse_pair({"prompt": prompt, "chosen": chosen, "rejected": rejected}, "line 1")


def test_messages_with_and_without_a_prompt_give_the_same_pair() -> None:
    given = parse_pair({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, "line 1")
    implied = parse_pair({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, "line 1")
    assert given == implied
    assert isinstance(given.chosen, ChatRow)
    assert (given.chosen.messages, given.chosen.num_prompt) == ([USER, GOOD], 1)
    assert given.rejected.messages == [USER, BAD]  # pyright: ignore


@pytest.mark.parametrize(
    "record",
    [
        "text",
        {},
        {"prompt": "a", "chosen": "b"},
        {"prompt": "a", "chosen": "b", "rejected": [BAD]},
        {"prompt": [USER], "chosen": "b", "rejected": "c"},
        {"chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": 1, "chosen": 2, "rejected": 3},
        {"chosen": [], "rejected": []},
    ],
)
def test_other_rows_are_refused_by_name(record: Any) -> None:
    with pytest.raises(DataError, match="line 1"):
        parse_pair(record, "line 1")


def test_the_split_follows_the_content(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(40)]
    swapped = [{"prompt": "0", "chosen": "b", "rejected": "a"}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows + rows + swapped)))
    train, held_out = (list(rows) for rows in split_rows(path, None, 0.3, read_pairs))
    digests = [{row.digest for row in rows} for rows in (train, held_out)]
    assert not digests[0] & digests[1]
    assert len(digests[0] | digests[1]) == 41
    assert len(train) + len(held_out) == 81


def test_a_batch_alternates_between_chosen_and_rejected() -> None:
    dataset = PairDataset(
        encode_pairs([pair("ab", "c", "defg"), pair("x", "yz", "w")], encode, max_length=9)
    )
    dataset.reference = -np.arange(1, 9, dtype=np.float32)
    batch = dataset.batch([1, 0])
    assert (len(dataset), batch.sample_ids) == (2, [1, 0])
    assert bytes(batch.tokens.tolist()) == b"xyzxwabcabdefg"
    assert (batch.lengths, batch.num_targets) == ([3, 2, 3, 6], [2, 1, 1, 4])
    assert batch.target_rows is not None
    assert bytes(batch.targets[batch.target_rows].tolist()) == b"yzwcdefg"
    assert batch.reference is not None
    assert batch.reference.tolist() == [-6, -7, -8, -1, -2, -3, -4, -5]
    moved = batch.to(torch.device("cpu"))
    assert moved.reference is not None
    assert moved.reference.equal(batch.reference)


def test_a_pair_is_dropped_as_a_whole() -> None:
    pairs = [pair("ab", "c", "defg"), pair("x", "yz", "w")]
    with pytest.raises(DataError, match="1 of 2 pairs"):
        encode_pairs(pairs, encode, max_length=5)
    kept = encode_pairs(pairs, encode, max_length=5, drop_long=True)
    assert kept.lengths == [3, 2]
    with pytest.raises(DataError, match="no pairs"):
        encode_pairs(pairs, encode, max_length=1, drop_long=True)


def test_an_answer_must_be_one_sequence() -> None:
    with pytest.raises(DataError, match="2 sequences"):
        encode_pairs([pair("a", "b", "c")], lambda row: encode(row) * 2, max_length=9)
