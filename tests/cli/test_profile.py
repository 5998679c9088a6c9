from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cli.conftest import Run

XOR = str(Path(__file__).parents[2] / "recipes" / "xor.toml")


def test_profile_prints_the_bottleneck_and_writes_the_page(cli: Run, tmp_path: Path) -> None:
    result = cli("profile", XOR, "device=cpu", "--steps", "3", COLUMNS="120")
    assert result.returncode == 0, result.stderr
    assert "Python between ops" in result.stdout
    assert "ingot::linear" in result.stdout
    assert "is the bottleneck" in result.stdout
    assert (tmp_path / "profile" / "report.html").is_file()
    assert (tmp_path / "profile" / "trace.json.gz").is_file()


def test_ranks_are_profiled_together(ready: Any, tmp_path: Path) -> None:
    options = ["grad_accum_steps=2", "device=cpu", "--steps", "2", "--ranks", "2", "--out", "two"]
    result = ready("profile", XOR, *options, COLUMNS="120")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("is the bottleneck") == 1
    assert "communication" in result.stdout
    assert "<h2>Ranks</h2>" in (tmp_path / "two" / "report.html").read_text()
    assert (tmp_path / "two" / "rank-1-trace.json.gz").is_file()
