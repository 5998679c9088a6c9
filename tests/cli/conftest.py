"""Runs the real command in a process of its own, with a cache of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ingot(tmp_path: Path) -> Run:
    command = str(Path(sys.executable).parent / "ingot")

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "80", **variables}
        environment = {name: value for name, value in environment.items() if value}
        return subprocess.run(
            [command, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True
        )

    return run
