"""Rows of all kinds and formats; what is not a row is named with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from ingot.core.errors import DataError
from ingot.data.row import ChatRow, TextRow, parse_row, read_rows, split_rows

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def write(path: Path, records: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def test_kinds_of_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path / "chats.jsonl",
        [
            {"messages": CHAT, "source": "ignored"},
            {"messages": CHAT, "tools": TOOLS},
            {"messages": CHAT, "tools": json.dumps(TOOLS)},
            {"prompt": CHAT[:1], "completion": CHAT[1:]},
            {"prompt": "2 + 2 =", "completion": " 4"},
            {"text": "a text", "messages": None},
        ],
    )
    chat, tools, same_tools, parts, completion, text = read_rows(path)
    assert isinstance(chat, ChatRow)
    assert (chat.messages, chat.tools, chat.num_prompt) == (CHAT, None, 0)
    assert chat.name == f"{path}: line 1"
    assert isinstance(tools, ChatRow)
    assert isinstance(same_tools, ChatRow)
    assert tools.tools == same_tools.tools == TOOLS
    assert isinstance(parts, ChatRow)
    assert (parts.messages, parts.num_prompt) == (CHAT, 1)
    assert isinstance(completion, TextRow)
    assert (completion.prompt, completion.completion) == ("2 + 2 =", " 4")
    assert isinstance(text, TextRow)
    assert (text.prompt, text.completion) == ("", "a text")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_tables_have_no_nulls_in_messages(tmp_path: Path, suffix: str) -> None:
    """All messages of a column have the same keys, which are null where they do not apply."""
    answer = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    table = pa.Table.from_pylist(
        [{"messages": [CHAT[0], answer], "tools": json.dumps(TOOLS), "id": 1}, {"messages": CHAT}]
    )
    path = tmp_path / f"chats.{suffix}"
    if suffix == "parquet":
        parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    call, plain = read_rows(path)
    assert isinstance(call, ChatRow)
    assert call.messages == [CHAT[0], {"role": "assistant", "tool_calls": [CALL]}]
    assert call.tools == TOOLS
    assert isinstance(plain, ChatRow)
    assert (plain.messages, plain.tools, plain.name) == (CHAT, None, f"{path}: row 2")


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ([], "must be an object"),
        ({"conversation": []}, "its keys are conversation"),
        ({"prompt": "a", "completion": CHAT}, "its keys are prompt, completion"),
        ({"messages": []}, "1 to 4,096 objects"),
        ({"messages": CHAT * 3000}, "1 to 4,096 objects"),
        ({"messages": ["Hi"]}, "message 0 must be an object with a role"),
        ({"messages": [{"role": 5}]}, "message 0 must be an object with a role"),
        ({"messages": CHAT, "tools": "{"}, "tools are not JSON"),
        ({"messages": CHAT, "tools": "[1]"}, "tools must be a list of objects"),
    ],
)
def test_what_is_not_a_row_is_named(record: Any, why: str) -> None:
    with pytest.raises(DataError, match=r"chats: line 7: not a row to train on: .*" + why):
        parse_row(record, "chats: line 7")


def test_other_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "chats.txt").write_text("Hi")
    with pytest.raises(DataError, match=r"\.jsonl, \.parquet or \.arrow"):
        list(read_rows(tmp_path / "chats.txt"))
    parquet.write_table(pa.table({"id": [1]}), tmp_path / "ids.parquet")
    with pytest.raises(DataError, match="none of the columns messages") as caught:
        list(read_rows(tmp_path / "ids.parquet"))
    assert "it has: id" in caught.value.hint


def test_splits_depend_on_the_content_of_rows(tmp_path: Path) -> None:
    records = [{"text": f"text {i}"} for i in range(200)]
    path = write(tmp_path / "a.jsonl", [*records, *records])
    train, validation = map(list, split_rows(path, None, 0.2))
    texts, held_out = ({row.completion for row in rows} for rows in (train, validation))  # type: ignore[union-attr]
    assert len(train) + len(validation) == 400
    assert texts.isdisjoint(held_out)
    assert 20 < len(held_out) < 60
    more = write(tmp_path / "b.jsonl", [{"text": "new"}, *records])
    assert held_out <= {row.completion for row in split_rows(more, None, 0.2)[1]}  # type: ignore[union-attr]


def test_a_small_split_has_a_row_and_a_file_is_taken_as_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    train, validation = map(list, split_rows(path, None, 1e-9))
    assert (len(train), len(validation)) == (1, 1)
    other = write(tmp_path / "b.jsonl", [{"text": "three"}])
    train, validation = map(list, split_rows(path, other, 0.5))
    assert (len(train), len(validation)) == (2, 1)
