"""A process that answers, is slow, dies, or outlives its parent's interest."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ingot.core.sandbox import START_SECONDS, Sandbox

SCRIPT = """
import json, os, sys, time
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[1]))
while True:
    message = json.loads(connection.recv_bytes())
    if message == "exit":
        os._exit(1)
    if message == "sleep":
        time.sleep(60)
    connection.send_bytes(json.dumps({"message": message, "limits": sys.argv[2:]}).encode())
"""


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "json.py").write_text("raise ImportError")  # must not shadow Python's
    return Sandbox(tmp_path / "script.py", 2.5, 7)


def test_messages_are_answered_by_the_same_process(sandbox: Sandbox) -> None:
    assert sandbox.ask('"a"', START_SECONDS) == {"message": "a", "limits": ["2.5", "7"]}
    assert sandbox.ask("[1]", START_SECONDS) == {"message": [1], "limits": ["2.5", "7"]}
    assert sandbox.alive()


def test_a_slow_process_is_killed(sandbox: Sandbox) -> None:
    assert sandbox.ask('"a"', START_SECONDS)
    begin = time.monotonic()
    assert sandbox.ask('"sleep"', 0.2) is None
    assert time.monotonic() - begin < 5
    assert not sandbox.alive()
    assert sandbox.ask('"a"', 0.2) is None


def test_a_dead_process_is_reported(sandbox: Sandbox) -> None:
    assert sandbox.ask('"exit"', START_SECONDS) is None
    assert not sandbox.alive()


@pytest.mark.parametrize("how", ["close", "del"])
def test_the_process_ends_with_the_object(sandbox: Sandbox, how: str, tmp_path: Path) -> None:
    other = Sandbox(tmp_path / "script.py")
    process = other._process.pid
    if how == "close":
        other.close()
        other.close()
    del other
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert sandbox.alive()
