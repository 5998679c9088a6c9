"""Metrics files of interrupted and resumed runs."""

from __future__ import annotations

from pathlib import Path

from ingot.observe.metrics import NAME, MetricsLog, read


def test_lines_after_a_checkpoint_are_removed(tmp_path: Path) -> None:
    metrics = MetricsLog(tmp_path)
    for step in range(5):
        metrics.add({"step": step})
    again = MetricsLog(tmp_path, lines=3)
    again.add({"step": 30})
    assert again.lines == 4
    assert [line["step"] for line in read(tmp_path)] == [0, 1, 2, 30]


def test_an_incomplete_line_is_left_out(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"step": 1}\n{"step": 2, "lo')
    assert read(tmp_path) == [{"step": 1}]
    assert MetricsLog(tmp_path, lines=1).lines == 1
    assert (tmp_path / NAME).read_text() == '{"step": 1}\n'


def test_losses_are_stored_bitwise(tmp_path: Path) -> None:
    value = 0.1 + 2**-52
    MetricsLog(tmp_path).add({"loss": value, "grad_norm": float("inf")})
    assert read(tmp_path) == [{"loss": value, "grad_norm": float("inf")}]
