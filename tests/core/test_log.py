"""Log lines and progress bars, on a real terminal and into a pipe."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from datetime import datetime

import pytest

from ingot.core.log import logger

SCRIPT = """
from ingot.core import log
log.setup()
with log.progress("load [weights]", 3) as progress:
    progress.advance()
    log.logger("ingot.nn").info("halfway [bold]there")
    print("a result")
    progress.describe("still loading")
    progress.advance(2)
log.logger("nn").debug("detail")
"""


def on_terminal(script: str) -> tuple[str, str]:
    """Run with a terminal as stderr; return what came out of stdout and stderr."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, env=environment)
    os.close(slave)
    chunks: list[bytes] = []
    with os.fdopen(master, "rb", buffering=0) as terminal:
        while chunk := _read(terminal.fileno()):
            chunks.append(chunk)
    stdout = process.communicate()[0].decode()
    assert process.returncode == 0, b"".join(chunks).decode()
    return stdout, b"".join(chunks).decode()


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except OSError:  # how Linux says that the other side of a terminal is closed
        return b""


def piped(script: str, **environment: str) -> tuple[str, str]:
    """Run with pipes; return what came out of stdout and stderr."""
    command = [sys.executable, "-c", script]
    env = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return done.stdout, done.stderr


def test_a_terminal_sees_a_bar_with_times_and_messages_above_it() -> None:
    stdout, stderr = on_terminal(SCRIPT)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stderr)
    assert "load [weights]" in text
    assert re.search(r"still loading ━+ 3/3 0:00:\d\d 0:00:\d\d", text)
    assert "halfway [bold]there" in text
    assert "detail" not in text
    assert "\x1b[" in stderr
    assert stdout == "a result\n", "a piped stdout keeps its results"


@pytest.mark.parametrize("environment", [{}, {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}])
def test_a_pipe_sees_plain_lines_and_no_bar(environment: dict[str, str]) -> None:
    stdout, stderr = piped(SCRIPT, **environment)
    assert re.fullmatch(r"\d{4}-\S+ \S+ INFO ingot\.nn: halfway \[bold\]there\n", stderr)
    assert stdout == "a result\n"


def test_a_failure_inside_the_bar_comes_out() -> None:
    script = """
from ingot.core.log import progress
try:
    with progress("work", None) as p:
        p.advance()
        1 / 0
except ZeroDivisionError:
    print("came out")
"""
    assert piped(script)[0] == "came out\n"
    assert on_terminal(script)[0] == "came out\n"


def test_bytes_are_counted_in_their_own_units() -> None:
    script = """
from ingot.core import log
with log.progress("copying", 2_500_000, in_bytes=True) as progress:
    progress.advance(2_500_000)
"""
    assert "2.5/2.5 MB" in on_terminal(script)[1]


def test_setup_twice_is_setup_once_with_the_last_word() -> None:
    stdout, stderr = piped("""
import logging
from ingot.core import log
log.setup(verbose=True)
log.logger().addHandler(logging.NullHandler())
logging.getLogger().addHandler(logging.StreamHandler())  # not ours to touch or to write to
log.setup()
log.setup(verbose=True)
log.logger("x").debug("detail")
print(len(log.logger().handlers), len(logging.getLogger().handlers), logging.getLogger().level)
""")
    assert stdout == "2 1 30\n"
    assert stderr.count("DEBUG ingot.x: detail") == stderr.count("\n") == 1


def test_importing_and_logging_need_no_rich() -> None:
    script = "import sys; from ingot.core import log; log.setup(); print('rich' in sys.modules)"
    assert piped(script)[0] == "False\n"


def test_consoles_are_one_per_stream() -> None:
    script = """
from ingot.core import log
assert log.stdout() is log.stdout() and log.stderr() is log.stderr()
log.stdout().print("out"); log.stderr().print("err")
"""
    assert piped(script) == ("out\n", "err\n")


@pytest.mark.parametrize(
    ("name", "full"),
    [("ingot", "ingot"), ("ingot.a.b", "ingot.a.b"), ("a", "ingot.a"), ("ingots", "ingot.ingots")],
)
def test_loggers_live_below_ingot(name: str, full: str) -> None:
    assert logger(name).name == full


def test_json_has_a_line_for_each_message_whatever_is_in_it() -> None:
    script = """
from ingot.core import log
log.setup(json=True)
log.logger("serving").info("two\\nlines", extra={"fields": {"tokens": 3, "path": object}})
try:
    1 / 0
except ZeroDivisionError:
    log.logger("serving").exception("broken")
"""
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second = map(json.loads, run.stderr.splitlines())
    assert (first["message"], first["tokens"], first["level"]) == ("two\nlines", 3, "info")
    assert first["logger"] == "ingot.serving"
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert "ZeroDivisionError" in second["traceback"]
