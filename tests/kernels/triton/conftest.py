"""One interpreter process per test process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="GPU kernels need Triton, if only to be compiled")

from ingot.kernels.triton.interpreter import Interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    script = Path(__file__).parent / "interpreter_process.py"
    with Interpreter(script) as running:
        yield running
