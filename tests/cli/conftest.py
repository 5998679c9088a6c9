"""Runs the command in this process (`cli`) or in its own (`ingot`), with a separate cache."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from ingot.cli import main
from ingot.core import log
from tests import fork, models

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = str(Path(sys.executable).parent / "ingot")
# The cache with the built kernels, and one thread, since tests run in parallel.
READY = {"XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", ""), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command in this process, which saves starting Python and importing torch.

    It has the cache with the built kernels and runs in `tmp_path`.
    """

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        root = logging.getLogger("ingot")
        handlers, level, propagate = root.handlers[:], root.level, root.propagate
        with monkeypatch.context() as patch:
            for name, value in {"COLUMNS": "80", **variables}.items():
                patch.setenv(name, value)
            patch.chdir(tmp_path)
            patch.setattr("ingot.cli._frozen_objects", nullcontext)
            _forget_consoles()
            try:
                main(arguments)
            except SystemExit as exit:
                status = int(exit.code or 0)
            finally:
                _forget_consoles()
                root.handlers[:], root.propagate = handlers, propagate
                root.setLevel(level)
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, status, out, err)

    return run


@pytest.fixture(autouse=True)
def _own_console() -> Iterator[None]:
    _forget_consoles()
    yield
    _forget_consoles()


def _forget_consoles() -> None:
    """Consoles are cached with the width and the streams they were created with."""
    log.stdout.cache_clear()
    log.stderr.cache_clear()


@pytest.fixture
def ingot(tmp_path: Path) -> Run:
    """The command in its own process, with an empty cache."""

    def run(
        *arguments: str, stdin: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "COLUMNS": "80", **variables}
        environment = {name: value for name, value in environment.items() if value}
        return fork.run(["-m", "ingot", *arguments], env=environment, cwd=tmp_path, stdin=stdin)

    return run


@pytest.fixture
def ready(ingot: Run) -> Run:
    """The command in its own process, with the built kernels."""
    return partial(ingot, **READY)


@pytest.fixture
def environment() -> dict[str, str]:
    """Environment variables of a process with the built kernels."""
    return {name: value for name, value in {**os.environ, **READY}.items() if value}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A model of random weights that has a token for each byte and a chat template."""
    return models.small(tmp_path / "tiny")
