"""Find the answer in a model's output, and compare it with the expected one.

Both are stripped of whitespace at their ends and then compared character by character.

The regular expression that finds the answer comes from a task file, and Python's `re` backtracks:
`(a+)+$` takes years for some outputs of a hundred characters, and holds the interpreter's lock
meanwhile. So it runs in a sandbox with a memory limit (`ingot.core.sandbox`), which is killed after
a timeout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ingot.core.errors import ConfigError
from ingot.core.sandbox import START_SECONDS, Sandbox

SECONDS = 2.0
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
        self._sandbox = Sandbox(Path(__file__).with_name("matcher.py"), SECONDS, MAX_MEMORY)
        self._ask(pattern, START_SECONDS)

    def find(self, output: str) -> str | None:
        """Return the answer in an output; None if the expression does not match."""
        return self._ask(output[:MAX_OUTPUT], SECONDS)["text"]

    def close(self) -> None:
        """Stop the process."""
        self._sandbox.close()

    def _ask(self, text: str, seconds: float) -> dict[str, Any]:
        answer = self._sandbox.ask(json.dumps(text), seconds)
        if answer is None:
            answer = {"error": f"it does not finish within {SECONDS:.0f} s"}
        if "error" in answer:
            raise ConfigError(
                f"extract: '{self.pattern:.100}': {answer['error']}",
                hint="correct the regular expression; avoid repetitions inside repetitions",
            )
        return answer
