from __future__ import annotations

import json
from pathlib import Path

from tests import models
from tests.cli.conftest import Run


def test_decode_steps_and_speedups(cli: Run, tmp_path: Path) -> None:
    directory = models.small(tmp_path / "small", max_seq_len=2048)
    result = cli("bench", "engine", str(directory), "--rounds", "1", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert [row["batch_size"] for row in found["decode"]] == [1, 8, 32]
    assert len(found["options"]) == 5
    speedups = found["speedups"]
    assert [speedup["name"] for speedup in speedups] == ["ngram", "prefix", "int4"]
    assert all(speedup["same_tokens"] and speedup["ratio"] > 0 for speedup in speedups)


def test_missing_model_has_a_hint(cli: Run) -> None:
    result = cli("bench", "engine", "nowhere")
    assert result.returncode == 2
    assert "hint:" in result.stderr
