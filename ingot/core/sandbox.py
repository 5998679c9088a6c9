"""Run a script that handles untrusted input in a process of its own.

    sandbox = Sandbox(Path("renderer.py"), 2.0, 1 << 24)
    sandbox.ask('"Hello"', seconds=2.0)

The script gets the file descriptor of a `multiprocessing.connection.Connection` as its first
argument, then its limits. It answers each message with a JSON object, and sets its own limit of
memory. A process that does not answer in time is killed: Python code cannot reliably be stopped in
its own process, least of all in a thread, while it is in one long call into C.
"""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_SECONDS = 30.0
"""Timeout of the first message, which waits for the interpreter and its imports."""


class Sandbox:
    """A process that runs a script; it is stopped with this object."""

    def __init__(self, script: Path, *limits: float) -> None:
        ours, theirs = Pipe()
        # -P: a module next to the script must not shadow a package, as `gguf` would.
        # A session of its own: Ctrl-C in the terminal must not reach it.
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", str(script), str(theirs.fileno()), *map(str, limits)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._process, self._connection = process, ours
        self.close = weakref.finalize(self, _stop, process, ours)

    def alive(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    def ask(self, content: str, seconds: float) -> dict[str, Any] | None:
        """Send JSON and return the answer; None after a timeout or if the process died."""
        try:
            self._connection.send_bytes(content.encode())
            if self._connection.poll(seconds):
                return json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            pass
        self.close()
        return None


def _stop(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()
