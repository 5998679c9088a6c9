"""Run the commands of the README, in order, in a fresh directory: `python -m tools.readme`.

Every `bash` block runs under `bash -e`, every `python` block as a script. `pip install` and
`git clone` lines are skipped: the environment this runs in is their result. Models are downloaded
from a hub on loopback (`tools.hub`), which has the README's model under its name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tools import hub

README = Path(__file__).parent.parent / "README.md"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INSTALLING = ("pip install", "git clone", "cd ingot", "python -m venv", ". .venv")


def blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the text of each block to run.

    >>> blocks("```bash\\npip install x\\ningot ops\\n```")
    [('bash', 'ingot ops\\n')]
    """
    matches = [(str(language), str(body)) for language, body in _BLOCK.findall(text)]
    return [(language, _without_installing(body)) for language, body in matches]


def main() -> int:
    """Run all blocks and return the number of those that failed."""
    failures, text = 0, README.read_text()
    with tempfile.TemporaryDirectory() as directory, _environment(directory, text) as environment:
        for language, body in blocks(text):
            command = ["bash", "-eo", "pipefail", "-c", body]
            if language == "python":
                command = [sys.executable, "-c", body]
            print(body.rstrip(), flush=True)  # noqa: T201
            result = subprocess.run(command, cwd=directory, env=environment)
            failures += result.returncode != 0
    return failures


@contextmanager
def _environment(directory: str, text: str) -> Generator[dict[str, str]]:
    """Yield the environment of the commands: data in the directory, models from our own hub."""
    environment = {**os.environ, "XDG_DATA_HOME": directory}
    if MODEL not in text:
        yield environment
        return
    from tests.models import smollm2

    with hub.serving({MODEL: smollm2()}) as endpoint:
        yield {**environment, "HF_ENDPOINT": endpoint}


def _without_installing(body: str) -> str:
    lines = body.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(_INSTALLING))


if __name__ == "__main__":
    sys.exit(main())
