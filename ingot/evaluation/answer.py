"""Find the answer in a model's output, and compare it with the expected one.

Both are stripped of whitespace at their ends and then compared character by character.

The regular expression that finds the answer comes from a task file, and Python's `re` backtracks:
`(a+)+$` takes years for some outputs of a hundred characters, and holds the interpreter's lock
meanwhile. So it runs in a separate process with a memory limit, which is killed after a timeout.
"""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from collections.abc import Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ingot.core.errors import ConfigError

SECONDS = 2.0
START_SECONDS = 30.0
MAX_MEMORY = 1 << 28  # bytes
MAX_OUTPUT = 1 << 24  # characters that are searched


def is_correct(answer: str | None, accepted: Iterable[str]) -> bool:
    """Return whether an answer equals one of those accepted, apart from whitespace at its ends.

    >>> is_correct(" 42\\n", ["42"]), is_correct("Paris.", ["Paris"]), is_correct(None, [""])
    (True, False, False)
    """
    return answer is not None and answer.strip() in {one.strip() for one in accepted}


class Extractor:
    """A regular expression, and the process that searches for it.

    >>> Extractor(r"#### (-?\\d+)").find("6 * 7 = 42\\n#### 42")
    '42'
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        ours, theirs = Pipe()
        script = str(Path(__file__).with_name("matcher.py"))
        limits = str(SECONDS), str(MAX_MEMORY)
        # -P: a module next to the script must not shadow one of Python's.
        # A session of its own: Ctrl-C in the terminal must not reach it.
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-S", script, str(theirs.fileno()), *limits],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._connection = ours
        self._stop = weakref.finalize(self, _stop, process, ours)
        self._ask(pattern, START_SECONDS)

    def find(self, output: str) -> str | None:
        """Return the answer in an output; None if the expression does not match."""
        return self._ask(output[:MAX_OUTPUT], SECONDS)["text"]

    def close(self) -> None:
        """Stop the process."""
        self._stop()

    def _ask(self, text: str, seconds: float) -> dict[str, Any]:
        answer: dict[str, Any] | None = None
        try:
            self._connection.send_bytes(json.dumps(text).encode())
            if self._connection.poll(seconds):
                answer = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):  # it has died, or was killed
            pass
        if answer is None:
            self._stop()
            answer = {"error": f"it does not finish within {SECONDS:.0f} s"}
        if "error" in answer:
            raise ConfigError(
                f"extract: '{self.pattern:.100}': {answer['error']}",
                hint="correct the regular expression; avoid repetitions inside repetitions",
            )
        return answer


def _stop(process: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    process.kill()
    process.wait()
