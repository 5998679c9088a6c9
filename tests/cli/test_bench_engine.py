from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from tests import models

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_what_shortcuts_save(ready: Run, tmp_path: Path) -> None:
    directory = models.small(tmp_path / "small", max_seq_len=2048)
    result = ready("bench", "engine", str(directory), "--rounds", "1", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert [row["batch_size"] for row in found["decode"]] == [1, 8, 32]
    speedups = found["speedups"]
    assert [speedup["name"] for speedup in speedups] == ["ngram", "prefix"]
    assert all(speedup["same_tokens"] and speedup["ratio"] > 0 for speedup in speedups)


def test_a_model_that_is_not_there_has_a_hint(ready: Run) -> None:
    result = ready("bench", "engine", "nowhere")
    assert result.returncode == 2
    assert "hint:" in result.stderr
