from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.bench.results import append, prepare
from ingot.bench.train import TrainRow
from tests.bench.row import ROW, RUN
from tools import measured

PAGE = SimpleNamespace(file=SimpleNamespace(src_uri="bench.md"))


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    return tmp_path / "ops.csv"


def test_page_shows_called_rows_and_the_machine(results: Path) -> None:
    prepare(results)
    append(results, RUN, [ROW, replace(ROW, provider="aten", vs_eager=1.0, batch_invariant=False)])
    text = measured.on_page_markdown(f"# Bench\n{measured.PLACE}", PAGE)
    assert "Measured 2026-11-15 on Xeon, 2 cores (amx), torch 2, ingot 0.1." in text
    assert "| **activation** | 1 | 25% | 2.00x | - |" in text
    assert "| silu | 32x64 | bf16 | cpu | 2 | memory | 25% | 2.00x | - | yes |" in text
    assert "aten | 2 |" not in text


def test_page_without_results_says_so(results: Path) -> None:
    assert measured.on_page_markdown(measured.PLACE, PAGE) == "No results yet."
    assert measured.on_page_markdown(measured.COMPARE_PLACE, PAGE) == "No results yet."
    assert measured.on_page_markdown(measured.TRAIN_PLACE, PAGE) == "No results yet."


def test_compared_systems_of_the_last_run_are_shown(results: Path) -> None:
    run = {"date": "2026-11-15T10:00", "cpu": "Xeon", "isa": "amx", "torch": "2", "ingot": "0.1"}
    task = {"model": "m", "batch_size": "1", "input_len": "16", "output_len": "8", "rounds": "5"}
    speed = {"tokens_per_s": "70", "p20": "60", "p80": "80", "roofline_fraction": "0.7"}
    rest = {"speedup": "2.0", "ttft_ms": "30", "load_s": "4"}
    memory = {"memory_mb": "500", "peak_memory_mb": "600"}
    what = {"system": "other", "version": "1.0", "dtype": "bf16", "read_gbs": "30", "error": ""}
    row = {**run, **task, **speed, **rest, **memory, **what}
    old = {**row, "date": "2026-11-14", "system": "older"}
    unknown = {**row, "batch_size": "8", "date": "2026-11-13", "peak_memory_mb": ""}
    gone = {**row, "system": "gone", "error": "not installed"}
    with (results.parent / "compare.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerows([old, row, gone, unknown])
    text = measured.on_page_markdown(measured.COMPARE_PLACE, PAGE)
    assert "Measured 2026-11-15 on Xeon (amx), ingot 0.1: m, 1 x 16 tokens in, 1 x 8 out" in text
    line = "| other | 1.0 | bf16 | 70 (60 to 80) | 70% | 2.00x | 30 ms | 4 s | 500 MB |"
    assert f"{line} 600 MB |" in text
    assert f"{line} - |" in text
    assert "| gone | error: not installed | - |" in text
    assert "older" not in text
    assert "Measured 2026-11-13 on Xeon (amx), ingot 0.1: m, 8 x 16 tokens in" in text


def test_training_steps_of_the_last_run_are_shown(results: Path) -> None:
    path = results.parent / "train.csv"
    prepare(path, TrainRow)
    task: dict[str, Any] = {"model": "gpt2", "batch_size": 4, "seq_len": 512, "rounds": 3}
    speed: dict[str, Any] = {
        "tokens_per_s": 700.0,
        "p20": 600.0,
        "p80": 800.0,
        "roofline_fraction": 0.2,
    }
    parts: dict[str, Any] = {
        "speedup": 1.0,
        "forward_s": 1.0,
        "backward_s": 1.5,
        "optimizer_s": 0.2,
    }
    names = ("peak", "step", "activation")
    memory: dict[str, Any] = {
        f"{name}_memory_bytes": 10**9 * gb for gb, name in enumerate(names, 1)
    }
    kind = {"system": "ingot", "precision": "bf16", "recompute": "full", "state_dtype": "fp32"}
    row = TrainRow(**kind, **task, **speed, **parts, **memory, version="0.1")
    append(path, replace(RUN, date="2026-11-13"), [replace(row, system="older")])
    append(path, RUN, [row, TrainRow(**{**kind, "system": "gone"}, **task, error="reason")])
    text = measured.on_page_markdown(measured.TRAIN_PLACE, PAGE)
    assert "Measured 2026-11-15 on Xeon, 2 cores (amx), torch 2, ingot 0.1: gpt2, 4 x 512" in text
    line = "| ingot 0.1, bf16, recompute full | 700.0 (600.0 to 800.0) | 20% | 1.00x | "
    assert line + "1000, 1500, 200 | 1.00, 2.00, 3.00 |" in text
    assert "| gone | error: reason | - |" in text
    assert "older" not in text


def test_other_pages_are_unchanged() -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    assert measured.on_page_markdown(measured.PLACE, page) == measured.PLACE
