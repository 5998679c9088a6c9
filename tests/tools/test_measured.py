from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.bench.results import append, prepare
from ingot.bench.train import Row
from tests.bench.row import ROW, RUN
from tools import measured

PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="bench.md"))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    return tmp_path / "ops.csv"


def test_the_page_shows_the_op_as_it_is_called_and_where(results: Path) -> None:
    prepare(results)
    append(results, RUN, [ROW, replace(ROW, provider="aten", vs_aten=1.0, batch_invariant=False)])
    text = measured.on_page_markdown(f"# Bench\n{measured.PLACE}", PAGE)
    assert "Measured 2026-11-15 on Xeon, 2 cores (amx), torch 2, ingot 0.1." in text
    assert "| **activation** | 1 | 25% | 2.00x | - |" in text
    assert "| silu | 32x64 | bf16 | cpu | 2 | memory | 25% | 2.00x | - | yes |" in text
    assert "aten | 2 |" not in text


def test_without_a_run_the_page_says_so(results: Path) -> None:
    assert measured.on_page_markdown(measured.PLACE, PAGE) == "No run is kept yet."
    assert measured.on_page_markdown(measured.PEERS_PLACE, PAGE) == "No run is kept yet."
    assert measured.on_page_markdown(measured.TRAIN_PLACE, PAGE) == "No run is kept yet."


def test_the_peers_of_the_last_run_are_shown(results: Path) -> None:
    run = {"date": "2026-11-15T10:00", "cpu": "Xeon", "isa": "amx", "torch": "2", "ingot": "0.1"}
    task = {"model": "m", "batch": "1", "prompt": "16", "new": "8", "rounds": "5"}
    speed = {"tokens_per_s": "70", "p20": "60", "p80": "80", "share_of_limit": "0.7"}
    rest = {"ingot_faster": "2.0", "first_token_ms": "30", "start_s": "4", "memory_mb": "500"}
    what = {"system": "other", "version": "1.0", "dtype": "bf16", "read_gbs": "30", "missing": ""}
    row = {**run, **task, **speed, **rest, **what}
    old = {**row, "date": "2026-11-14", "system": "older"}
    gone = {**row, "system": "gone", "missing": "not installed"}
    with (results.parent / "peers.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerows([old, row, gone, {**row, "batch": "8", "date": "2026-11-13"}])
    text = measured.on_page_markdown(measured.PEERS_PLACE, PAGE)
    assert "Measured 2026-11-15 on Xeon (amx), ingot 0.1: m, 1 x 16 tokens in, 1 x 8 out" in text
    line = "| other | 1.0 | bf16 | 70 (60 to 80) | 70% | 2.00x | 30 ms | 4 s | 500 MB |"
    assert line in text
    assert "| gone | missing: not installed | - |" in text
    assert "older" not in text
    assert "Measured 2026-11-13 on Xeon (amx), ingot 0.1: m, 8 x 16 tokens in" in text


def test_the_steps_of_the_last_run_are_shown(results: Path) -> None:
    path = results.parent / "train.csv"
    prepare(path, Row)
    task: dict[str, Any] = {"model": "gpt2", "batch": 4, "length": 512, "rounds": 3}
    speed: dict[str, Any] = {
        "tokens_per_s": 700.0,
        "p20": 600.0,
        "p80": 800.0,
        "share_of_limit": 0.2,
    }
    parts: dict[str, Any] = {
        "ingot_faster": 1.0,
        "forward_s": 1.0,
        "backward_s": 1.5,
        "update_s": 0.2,
    }
    names = ("peak", "step", "activation")
    memory: dict[str, Any] = {
        f"{name}_memory_bytes": 10**9 * gb for gb, name in enumerate(names, 1)
    }
    kind = {"system": "ingot", "precision": "bf16", "recompute": "full", "moments": "fp32"}
    row = Row(**kind, **task, **speed, **parts, **memory, version="0.1")
    append(path, replace(RUN, date="2026-11-13"), [replace(row, system="older")])
    append(path, RUN, [row, Row(**{**kind, "system": "gone"}, **task, missing="why")])
    text = measured.on_page_markdown(measured.TRAIN_PLACE, PAGE)
    assert "Measured 2026-11-15 on Xeon, 2 cores (amx), torch 2, ingot 0.1: gpt2, 4 x 512" in text
    line = "| ingot 0.1, bf16, recompute full | 700.0 (600.0 to 800.0) | 20% | 1.00x | "
    assert line + "1000, 1500, 200 | 1.00, 2.00, 3.00 |" in text
    assert "| gone | missing: why | - |" in text
    assert "older" not in text


def test_other_pages_are_left_alone() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    assert measured.on_page_markdown(measured.PLACE, page) == measured.PLACE
