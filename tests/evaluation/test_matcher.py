"""The process that searches: messages in, matches out."""

from __future__ import annotations

import json
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from ingot.evaluation import matcher


def ask(*messages: str, memory: int = 1 << 28) -> list[Any]:
    ours, theirs = Pipe()
    script = str(Path(matcher.__file__))
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-S", script, str(theirs.fileno()), "5", str(memory)],
            pass_fds=[theirs.fileno()],
        )
    answers: list[Any] = []
    for message in messages:
        ours.send_bytes(json.dumps(message).encode())
        answers.append(json.loads(ours.recv_bytes()))
    ours.close()
    assert process.wait(10) == 0
    return answers


def test_the_first_message_is_the_pattern() -> None:
    assert ask("a(.)", "xay", "b") == [{"text": None}, {"text": "y"}, {"text": None}]


def test_errors_are_reported_and_the_process_continues() -> None:
    broken, *rest = ask("(", "a", "ba")
    assert "unterminated" in broken["error"]
    assert rest == [{"text": None}, {"text": "a"}]  # the second message is the pattern now


def test_memory_is_limited() -> None:
    answers = ask("(?:(a)|(b))*c", "ab" * 2_000_000, memory=1 << 26)
    assert answers[1] == {"error": "it needs too much memory"}
