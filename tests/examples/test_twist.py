from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "twist.py"


def test_example_learns_and_decodes_the_same_bits() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as every test process
    command = [sys.executable, EXAMPLE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "the same bits" in done.stdout
    assert float(done.stdout.split()[1]) < 2


def test_example_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 80
