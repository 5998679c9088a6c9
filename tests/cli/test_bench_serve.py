from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Run


def test_server_is_compared_with_the_engine(cli: Run, tiny: Path, tmp_path: Path) -> None:
    asked = ("--num-requests", "6", "--clients", "2", "--input-len", "8", "--output-len", "8")
    plot = tmp_path / "latency.png"
    options = ("--engine", "--rounds", "2", "--plot", str(plot), "--json")
    result = cli("bench", "serve", str(tiny), *asked, *options)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["server"]["finish_reasons"] == found["engine"]["finish_reasons"] == {"length": 12}
    assert found["throughput_ratio"] > 0
    assert found["start_s"] > 0
    assert plot.stat().st_size > 10_000


def test_text_output(cli: Run, tiny: Path) -> None:
    asked = ("--num-requests", "4", "--request-rate", "50", "--input-len", "8", "--output-len", "8")
    result = cli("bench", "serve", str(tiny), *asked)
    assert result.returncode == 0, result.stderr
    assert "4 requests in" in result.stdout
    assert "after starting the server" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_engine_option_needs_a_directory(cli: Run) -> None:
    result = cli("bench", "serve", "http://127.0.0.1:1", "--engine")
    assert result.returncode == 2
    assert "hint: give the directory" in result.stderr


def test_server_that_does_not_start_is_an_error(cli: Run, tmp_path: Path) -> None:
    result = cli("bench", "serve", str(tmp_path / "nothing"))
    assert result.returncode == 2
    assert "did not start" in result.stderr
