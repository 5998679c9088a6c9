from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ingot.bench.results import append, prepare
from tests.bench.row import ROW, RUN
from tools import measured

PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="bench.md"))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measured, "RESULTS", tmp_path / "ops.csv")
    return tmp_path / "ops.csv"


def test_the_page_shows_the_op_as_it_is_called_and_where(results: Path) -> None:
    prepare(results)
    append(results, RUN, [ROW, replace(ROW, provider="aten", vs_aten=1.0, exact=False)])
    text = measured.on_page_markdown(f"# Bench\n{measured.PLACE}", PAGE)
    assert "Measured 2026-11-15 on Xeon, 2 cores (amx), torch 2, ingot 0.1." in text
    assert "| **activation** | 1 | 25% | 2.00x | - |" in text
    assert "| silu | 32x64 | bf16 | cpu | 2 | memory | 25% | 2.00x | - | yes |" in text
    assert "aten | 2 |" not in text


def test_without_a_run_the_page_says_so(results: Path) -> None:
    assert measured.on_page_markdown(measured.PLACE, PAGE) == "No run is kept yet."


def test_other_pages_are_left_alone() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    assert measured.on_page_markdown(measured.PLACE, page) == measured.PLACE
