"""The scripts of docs/bench.md, run as documented."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ingot.interop import hf
from ingot.interop.tokenizer import Tokenizer

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_only_named_systems_are_installed() -> None:
    result = run("install_peers.py", "unknown")
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def test_random_llama_is_written(tmp_path: Path) -> None:
    result = run("random_llama.py", str(tmp_path / "llama"))
    assert result.returncode == 0, result.stderr
    described = hf.describe(tmp_path / "llama")
    assert 90e6 < described.parameters < 110e6
    assert Tokenizer.load(tmp_path / "llama").encode("import sys")
