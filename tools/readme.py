"""Run the commands of the README, in order, in a fresh directory: `python -m tools.readme`.

Every `bash` block runs under `bash -e`, every `python` block as a script. `pip install` and
`git clone` lines are passed over: the environment this runs in is their result.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INSTALLING = ("pip install", "git clone", "cd ingot", "python -m venv", ". .venv")


def blocks(text: str) -> list[tuple[str, str]]:
    """The language and the text of each block that is to run.

    >>> blocks("```bash\\npip install x\\ningot ops\\n```")
    [('bash', 'ingot ops\\n')]
    """
    found = [(str(language), str(body)) for language, body in _BLOCK.findall(text)]
    return [(language, _without_installing(body)) for language, body in found]


def main() -> int:
    """Run them all; the number of those that failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as directory:
        for language, body in blocks(README.read_text()):
            command = ["bash", "-eo", "pipefail", "-c", body]
            if language == "python":
                command = [sys.executable, "-c", body]
            print(body.rstrip(), flush=True)  # noqa: T201
            failed += subprocess.run(command, cwd=directory).returncode != 0
    return failed


def _without_installing(body: str) -> str:
    lines = body.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(_INSTALLING))


if __name__ == "__main__":
    sys.exit(main())
