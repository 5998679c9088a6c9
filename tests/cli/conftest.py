"""Runs the real command in a process of its own, with a cache of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests import models

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = str(Path(sys.executable).parent / "ingot")
# The kernels that are built already, and a thread: tests run beside each other.
READY = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", ""), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def ingot(tmp_path: Path) -> Run:
    def run(
        *arguments: str, stdin: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "80", **variables}
        environment = {name: value for name, value in environment.items() if value}
        return subprocess.run(
            [COMMAND, *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            input=stdin,
        )

    return run


@pytest.fixture
def ready(ingot: Run) -> Run:
    """The command with the kernels that are built already."""
    return partial(ingot, **READY)


@pytest.fixture
def environment() -> dict[str, str]:
    """For a process with the kernels that are built already."""
    return {name: value for name, value in {**os.environ, **READY}.items() if value}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A model of random weights that has a token for each byte, and chats."""
    return models.small(tmp_path / "tiny")
