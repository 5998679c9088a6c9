"""Rows of conversations and texts, from JSONL, Parquet and Arrow files.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
    {"messages": [...], "tools": [...]}           with tool_calls in the assistant's messages
    {"prompt": [...], "completion": [...]}        messages; those of the prompt are not trained
    {"prompt": "2 + 2 =", "completion": " 4"}     text without a chat template
    {"text": "..."}                               text that is trained as a whole

A file may hold rows of different kinds; other keys are ignored. `tools` may be a JSON string, since
a column of a table cannot hold objects of different shapes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import msgspec

from ingot.core.errors import DataError
from ingot.data import table
from ingot.data.source import Source, read_jsonl
from ingot.data.source_scan import is_below

MAX_MESSAGES = 1 << 12
KEYS = ("messages", "tools", "prompt", "completion", "text")

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ChatRow:
    """A conversation, of which the first `num_prompt` messages are not trained."""

    name: str
    """Where it is: "chats.jsonl: line 3"."""
    digest: bytes
    """SHA-256 of its content."""
    messages: list[Record]
    tools: list[Record] | None = None
    num_prompt: int = 0


@dataclass(frozen=True, kw_only=True)
class TextRow:
    """A text, of which the prompt is not trained."""

    name: str
    digest: bytes
    prompt: str
    completion: str


Row = ChatRow | TextRow


def read_rows(where: str | Path) -> Iterator[Row]:
    """Yield the rows of a file, or of all such files in a folder."""
    return (parse_row(record, name) for name, record in read_records(where, KEYS))


def read_records(where: str | Path, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield the objects of a file, or of all such files in a folder, with where they are.

    Of a table, only the columns with these keys are read.
    """
    for path in Source(where).files():
        if path.suffix in (".jsonl", ".ndjson"):
            records = ((f"line {number:,}", record) for number, record in read_jsonl(path))
        elif path.suffix in table.SUFFIXES:
            rows = enumerate(table.read_records(path, keys), 1)
            records = ((f"row {number:,}", _without_none(record)) for number, record in rows)
        else:
            raise DataError(
                f"{path}: conversations must be in a .jsonl, .parquet or .arrow file",
                hint="write one JSON object per line, with messages in 'messages'",
            )
        for place, record in records:
            yield f"{path}: {place}", record


class HashedRow(Protocol):
    """A row of any kind."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of its content."""
        ...


R = TypeVar("R", bound=HashedRow)


def split_rows(
    source: str | Path,
    validation_source: str | Path | None,
    validation_fraction: float,
    read: Callable[[str | Path], Iterator[R]] = read_rows,
) -> tuple[Iterator[R], Iterator[R]]:
    """Return the rows for training and those for validation.

    Those of `validation_source`; or else a row is used for validation if the hash of its content is
    below the fraction, so that rows with equal content are in the same split. If that selects no
    row, or all, the row with the smallest hash is taken.
    """
    if validation_source is not None:
        return read(source), read(validation_source)
    digests = {row.digest for row in read(source)}
    held_out = {digest for digest in digests if is_below(digest[:8], validation_fraction)}
    if validation_fraction and digests and len(held_out) in (0, len(digests)):
        held_out = {min(digests)}
    return (
        (row for row in read(source) if row.digest not in held_out),
        (row for row in read(source) if row.digest in held_out),
    )


def parse_row(record: Any, name: str) -> Row:
    """Return the row of a JSON object; `name` is where it is, for errors.

    >>> parse_row({"prompt": "2 + 2 =", "completion": " 4"}, "line 1").completion
    ' 4'
    """
    if not isinstance(record, dict):
        raise _row_error(name, "must be an object")
    known = {key: value for key, value in cast(Record, record).items() if key in KEYS}
    known = {key: value for key, value in known.items() if value is not None}
    digest = hashlib.sha256(msgspec.json.encode(known, order="sorted")).digest()
    prompt, completion = known.get("prompt"), known.get("completion")
    if "messages" in known:
        messages, num_prompt = _messages(known["messages"], name), 0
    elif isinstance(prompt, list) and isinstance(completion, list):
        messages = _messages(cast(list[Any], prompt + completion), name)
        num_prompt = len(cast(list[Any], prompt))
    elif isinstance(prompt, str) and isinstance(completion, str):
        return TextRow(name=name, digest=digest, prompt=prompt, completion=completion)
    elif isinstance(text := known.get("text"), str):
        return TextRow(name=name, digest=digest, prompt="", completion=text)
    else:
        raise _row_error(
            name, f"its keys are {', '.join(list(cast(Record, record))[:8]) or 'none'}"
        )
    return ChatRow(
        name=name,
        digest=digest,
        messages=messages,
        tools=_tools(known.get("tools"), name),
        num_prompt=num_prompt,
    )


def _messages(value: Any, name: str) -> list[Record]:
    if not isinstance(value, list) or not 0 < len(cast(list[Any], value)) <= MAX_MESSAGES:
        raise _row_error(name, f"messages must be a list of 1 to {MAX_MESSAGES:,} objects")
    messages: list[Record] = []
    for number, message in enumerate(cast(list[Any], value)):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):  # pyright: ignore
            raise _row_error(name, f"message {number} must be an object with a role")
        fields = cast(Record, message).items()
        # `content` may be null in a message with tool calls; another null is a key that is absent.
        messages.append({key: v for key, v in fields if v is not None or key == "content"})
    return messages


def _tools(value: Any, name: str) -> list[Record] | None:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise _row_error(name, f"tools are not JSON: {error}") from error
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(t, dict) for t in cast(list[Any], value)):
        raise _row_error(name, "tools must be a list of objects")
    return cast(list[Record], value)


def _without_none(value: Any) -> Any:
    """Return the value without the nulls of objects: a table has one shape for all its rows.

    >>> _without_none({"messages": [{"role": "user", "content": "Hi", "tool_calls": None}]})
    {'messages': [{'role': 'user', 'content': 'Hi'}]}
    """
    if isinstance(value, dict):
        items = cast(Record, value).items()
        return {key: _without_none(v) for key, v in items if v is not None}
    if isinstance(value, list):
        return [_without_none(v) for v in cast(list[Any], value)]
    return value


def _row_error(name: str, why: str) -> DataError:
    return DataError(
        f"{name}: not a row to train on: {why}",
        hint="give it messages (and tools), or prompt and completion, or text",
    )
