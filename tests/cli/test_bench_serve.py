from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_the_command_tells_what_http_costs(ready: Run, tiny: Path, tmp_path: Path) -> None:
    asked = ("--requests", "6", "--clients", "2", "--prompt", "8", "--output", "8")
    plot = tmp_path / "latency.png"
    options = ("--engine", "--rounds", "2", "--plot", str(plot), "--json")
    result = ready("bench", "serve", str(tiny), *asked, *options)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["server"]["ends"] == found["engine"]["ends"] == {"length": 12}
    assert found["share_of_engine"] > 0
    assert found["start_s"] > 0
    assert plot.stat().st_size > 10_000


def test_lines_for_people(ready: Run, tiny: Path) -> None:
    asked = ("--requests", "4", "--rate", "50", "--prompt", "8", "--output", "8")
    result = ready("bench", "serve", str(tiny), *asked)
    assert result.returncode == 0, result.stderr
    assert "4 requests in" in result.stdout
    assert "from the command to the first token" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_an_address_has_no_bare_engine(ready: Run) -> None:
    result = ready("bench", "serve", "http://127.0.0.1:1", "--engine")
    assert result.returncode == 2
    assert "hint: give the directory" in result.stderr


def test_a_directory_without_a_model_says_so(ready: Run, tmp_path: Path) -> None:
    result = ready("bench", "serve", str(tmp_path / "nothing"))
    assert result.returncode == 2
    assert "did not start" in result.stderr
