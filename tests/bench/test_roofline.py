from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path

import pytest

from ingot.bench.peaks import Peak, Peaks
from ingot.bench.roofline import draw, free_box, overlap, point_of
from tests.bench.row import ROW, RUN

PEAK = Peak(value=40.0, low=10.0, typical=20.0, high=30.0)
PEAKS = Peaks(
    method=1,
    measured=datetime(2026, 11, 15, tzinfo=UTC),
    read_bandwidth=PEAK,
    matmul={"fp32": PEAK, "bf16": replace(PEAK, value=400.0), "int8": None},
)
ROWS = [
    ROW,
    replace(ROW, provider="aten", gbs=5.0, gflops=10.0),
    replace(ROW, provider="compile"),
    replace(ROW, op="linear", family="linear", gflops=300.0),
    replace(ROW, op="embedding", family="embedding", provider="aten", gflops=0.0),
    replace(ROW, op="sample", family="sample", provider="reference", gflops=0.1),
]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot_is_written(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"roofline{suffix}"
    draw(ROWS, PEAKS, RUN, path)
    start = path.read_bytes()[:5]
    assert start == {".png": b"\x89PNG\r", ".svg": b"<?xml"}[suffix]


def test_plot_without_rows_shows_the_roofs(tmp_path: Path) -> None:
    draw(
        [], replace(PEAKS, matmul=dict.fromkeys(("fp32", "bf16", "int8"))), RUN, tmp_path / "a.png"
    )
    assert (tmp_path / "a.png").exists()


def test_op_without_flops_is_at_the_left_edge() -> None:
    assert point_of(ROW, edge=0.1) == (2.0, 20.0)
    assert point_of(replace(ROW, gflops=0.0), edge=0.1) == (0.1, 1.0)


def test_labels_do_not_overlap() -> None:
    taken = [(-3.0, -3.0, 3.0, 3.0)]
    for _ in range(40):
        taken.append(free_box(0, 0, width=50, height=9, taken=taken))
    assert not any(overlap(one, other) for one, other in combinations(taken, 2))
