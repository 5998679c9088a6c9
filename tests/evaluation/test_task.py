"""Task files: kinds of rows, settings, and errors that name file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.core.errors import ConfigError, DataError, UnknownName
from ingot.evaluation import task as tasks
from ingot.evaluation.task import AnswerRow, ChoiceRow, EvalTask, PerplexityRow, TaskSettings


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "task.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("row", "kind", "expected"),
    [
        ({"text": "abc"}, "perplexity", PerplexityRow(1, "abc")),
        ({"prompt": "a", "answer": "b"}, "exact_match", AnswerRow(1, "a", ("b",))),
        ({"prompt": "a", "answer": 42, "id": 7}, "exact_match", AnswerRow(1, "a", ("42",))),
        ({"prompt": "a", "answer": ["x", 1]}, "exact_match", AnswerRow(1, "a", ("x", "1"))),
        (
            {"prompt": [{"role": "user", "content": "a"}], "answer": "b"},
            "exact_match",
            AnswerRow(1, ({"role": "user", "content": "a"},), ("b",)),
        ),
        (
            {"prompt": "a", "choices": ["b", "c"], "answer": 1},
            "multiple_choice",
            ChoiceRow(1, "a", ("b", "c"), 1),
        ),
    ],
)
def test_fields_say_what_is_measured(tmp_path: Path, row: Any, kind: str, expected: Any) -> None:
    task = EvalTask.read(write(tmp_path, row))
    assert (task.kind, task.num_rows) == (kind, 1)
    assert list(task.rows()) == [expected]


def test_lines_are_counted_with_blank_ones_and_the_settings(tmp_path: Path) -> None:
    path = write(tmp_path, {"settings": {"max_tokens": 7}}, "", {"text": "a"}, "  ", {"text": "b"})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    task = EvalTask.read(path)
    assert (task.num_rows, task.settings.max_tokens) == (2, 7)
    assert [row.line for row in task.rows()] == [3, 5]
    assert [row.line for row in task.rows(limit=1)] == [3]


def test_given_settings_replace_those_of_the_file(tmp_path: Path) -> None:
    header = {"settings": {"max_tokens": 7, "stop": ["\n"]}}
    path = write(tmp_path, header, {"prompt": "a", "answer": "b"})
    task = EvalTask.read(path, {"max_tokens": 9, "chat": True})
    assert task.settings == TaskSettings(max_tokens=9, stop=("\n",), chat=True)
    (row,) = task.rows()
    assert row == AnswerRow(2, ({"role": "user", "content": "a"},), ("b",))


@pytest.mark.parametrize(
    ("row", "message", "hint"),
    [
        ('{"text": ', "line 2: .*truncated", "correct"),
        ("[1]", "line 2: Expected `object`", "text"),
        ({"text": ""}, "line 2: text must not be empty", "remove"),
        ({"text": 5}, r"line 2: Expected .* `\$.text`", "text"),
        ({"promt": "a", "answer": "b"}, "line 2: the fields describe no task: 'promt'", "prompt"),
        ({"messages": [], "answer": "b"}, "line 2: the fields describe", 'rename "messages"'),
        ({"prompt": "", "answer": "b"}, "line 2: prompt must not be empty", "give"),
        ({"prompt": [{"content": "a"}], "answer": "b"}, "line 2: prompt: each message", "role"),
        ({"prompt": "a", "answer": []}, "line 2: answer: expected 1 to", "give"),
        ({"prompt": "a", "answer": 1.5}, r"line 2: Expected .* `\$.answer`", "text"),
        ({"prompt": "a", "answer": True}, r"line 2: Expected .* `\$.answer`", "text"),
        ({"prompt": "a", "choices": ["b"], "answer": 0}, "line 2: choices: expected 2", "correct"),
        ({"prompt": "a", "choices": ["b", ""], "answer": 0}, "line 2: choices", "correct"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": 2}, "from 0 to 1, got 2", "index"),
        ({"prompt": "a", "choices": ["b", "c"], "answer": "b"}, "from 0 to 1, got 'b'", "index"),
        ({"prompt": " ", "choices": ["b", "c"], "answer": 0}, "line 2: prompt must", "give"),
        ({"prompt": "a", "answer": "b"}, "same kind as before .perplexity., got exact", "differe"),
    ],
)
def test_a_bad_row_is_named_with_its_line(
    tmp_path: Path, row: Any, message: str, hint: str
) -> None:
    path = write(tmp_path, {"text": "fine"}, row)
    with pytest.raises(DataError, match=message) as error:
        EvalTask.read(path)
    assert str(path) in error.value.message
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "line 1: max_tokens: expected 1 to"),
        ({"max_tokens": "x"}, r"line 1: settings: Expected `int`"),
        ({"temprature": 1}, "line 1: unknown setting of a task 'temprature'"),
        ({"samples": 2}, "line 1: samples: 2 samples at temperature 0"),
        ({"stop": ["x"] * 17}, "line 1: number of stop strings"),
        ({"stop": [""]}, "line 1: characters of a stop string"),
        ({"extract": "x" * 5000}, "line 1: characters of extract"),
    ],
)
def test_bad_settings_of_the_file(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        EvalTask.read(write(tmp_path, {"settings": settings}, {"text": "a"}))


def test_bad_settings_of_the_caller(tmp_path: Path) -> None:
    path = write(tmp_path, {"text": "a"})
    with pytest.raises(UnknownName, match="did you mean 'temperature'"):
        EvalTask.read(path, {"temprature": 1})
    with pytest.raises(ConfigError, match=r"^top_p: expected 0 to 1, got nan"):
        EvalTask.read(path, {"top_p": float("nan")})


def test_files_that_hold_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="no such file"):
        EvalTask.read(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="no such file"):
        EvalTask.read(tmp_path)
    with pytest.raises(DataError, match="has no rows"):
        EvalTask.read(write(tmp_path, {"settings": {}}))
    monkeypatch.setattr(tasks, "MAX_LINE", 20)
    with pytest.raises(DataError, match="line 2: expected at most 20 bytes"):
        EvalTask.read(write(tmp_path, {"text": "a"}, {"text": "a" * 20}))
    monkeypatch.setattr(tasks, "MAX_ROWS", 2)
    with pytest.raises(DataError, match="line 3: expected at most 2 rows"):
        EvalTask.read(write(tmp_path, *[{"text": "a"}] * 3))


@given(
    line=st.integers(1, 10**7), sample=st.integers(0, 1023), seed=st.integers(-(2**63), 2**63 - 1)
)
def test_seeds_fit_in_31_bits_and_differ(line: int, sample: int, seed: int) -> None:
    settings = TaskSettings(seed=seed)
    assert 0 <= settings.seed_of(line, sample) < 2**31
    others = {settings.seed_of(line + 1, sample), settings.seed_of(line, sample + 1)}
    assert settings.seed_of(line, sample) not in others
