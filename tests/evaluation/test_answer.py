"""Answers in outputs: a regular expression can neither hang nor exhaust the process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ingot.core.errors import ConfigError
from ingot.evaluation import answer
from ingot.evaluation.answer import Extractor, is_correct


def test_only_whitespace_at_the_ends_is_ignored() -> None:
    assert is_correct("\n New York ", ["London", " New York"])
    assert not is_correct("new york", ["New York"])
    assert not is_correct("New  York", ["New York"])
    assert not is_correct("", ["x"])


@pytest.mark.parametrize(
    ("pattern", "output", "expected"),
    [
        (r"#### (-?\d+)", "so\n#### 42\n#### 43", "42"),
        (r"(?s).*#### (-?\d+)", "so\n#### 42\n#### 43", "43"),
        (r"\d+", "no number", None),
        (r"\d+", "7 of 9", "7"),
        (r"(a)|(b)", "b", None),
        (r"é+", "caféé \N{CHOCOLATE BAR}", "éé"),
        (r"(?i)answer: (\w+)", "ANSWER: Paris", "Paris"),
    ],
)
def test_the_first_group_of_the_first_match(
    pattern: str, output: str, expected: str | None
) -> None:
    extractor = Extractor(pattern)
    assert extractor.find(output) == expected
    extractor.close()


@pytest.mark.parametrize("pattern", ["(", "[a", "(?P<n>a)(?P<n>b)", "a{2,1}"])
def test_an_invalid_expression_is_an_error_at_once(pattern: str) -> None:
    with pytest.raises(ConfigError, match="extract: "):
        Extractor(pattern)


def test_backtracking_ends_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "SECONDS", 0.3)
    extractor, begin = Extractor("(a+)+$"), time.monotonic()
    with pytest.raises(ConfigError, match="does not finish within"):
        extractor.find("a" * 64 + "!")
    assert time.monotonic() - begin < 5


def test_the_process_ends_with_the_object() -> None:
    extractor = Extractor("x")
    process: int = extractor._sandbox._process.pid
    assert Path(f"/proc/{process}").exists()
    del extractor
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
