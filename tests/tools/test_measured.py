from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ingot.bench.ops import Row
from ingot.bench.results import Run, append, prepare
from tools import measured

PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="bench.md"))
RUN = Run(date="2026-11-15T12:00:00+00:00", cpu="Xeon, 2 cores", isa="amx", torch="2", ingot="0.1")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measured, "RESULTS", tmp_path / "ops.csv")
    return tmp_path / "ops.csv"


def row(provider: str, vs_aten: float) -> Row:
    return Row(
        op="silu",
        family="activation",
        shape="32x64",
        dtype="bf16",
        provider=provider,
        p20_us=1.0,
        p50_us=2.0,
        p80_us=3.0,
        gbs=10.0,
        gflops=20.0,
        read_gbs=40.0,
        limit="memory",
        share_of_limit=0.25,
        vs_aten=vs_aten,
        vs_compile=None,
        exact=provider == "cpu",
    )


def test_the_page_shows_the_op_as_it_is_called_and_where(results: Path) -> None:
    prepare(results)
    append(results, RUN, [row("cpu", 2.0), row("aten", 1.0)])
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
