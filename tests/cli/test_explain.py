from __future__ import annotations

from pathlib import Path

import pytest

from ingot.cli import explain as command
from ingot.workflows.explain import Machine
from tests.fuse import slow_models


def test_explain_prints_the_cause_and_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peaks = Machine(bandwidth=20.0, gflops={"float32": 100.0})
    monkeypatch.setattr(command, "machine", lambda: peaks)
    monkeypatch.setenv("COLUMNS", "120")
    command.explain(f"{slow_models.__file__}:dense", out=tmp_path / "page")
    out = capsys.readouterr().out
    assert "of roofline" in out
    assert "sdpa float32" in out
    assert "1. " in out
    assert "attention with a dense mask (slow_models.py:" in out
    assert "report.html" in out
    assert (tmp_path / "page" / "report.html").is_file()
