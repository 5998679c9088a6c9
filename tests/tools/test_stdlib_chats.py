"""The conversations of `recipes/smollm2-sft.toml`."""

from __future__ import annotations

import json
from pathlib import Path

from ingot.data.row import ChatRow, read_rows
from tools import stdlib_chats


def test_rows_are_the_same_every_time_and_splits_have_no_function_in_common(
    tmp_path: Path,
) -> None:
    for name in ("one", "two"):
        stdlib_chats.main(tmp_path / name)
    for name in ("train.jsonl", "validation.jsonl"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    train, held_out = (
        list(read_rows(tmp_path / "one" / f"{name}.jsonl")) for name in ("train", "validation")
    )
    assert (len(train), len(held_out)) == (500, 50)
    assert {answer(row) for row in train}.isdisjoint(answer(row) for row in held_out)
    assert sum(len(row.messages) == 4 for row in train if isinstance(row, ChatRow)) == 100


def answer(row: object) -> str:
    assert isinstance(row, ChatRow)
    return row.messages[1]["content"]


def test_answers_have_one_form() -> None:
    found = {function.qualified: function for function in stdlib_chats.functions()}
    row = stdlib_chats.conversation(found["textwrap.dedent"], 1)
    assert json.dumps(row)
    assert row["messages"][1]["content"].split("\n\n") == [
        "`textwrap.dedent(text)`",
        "Remove any common leading whitespace from every line in `text`.",
        "Read more: `help(textwrap.dedent)`",
    ]
