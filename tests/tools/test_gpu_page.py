from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="GPU kernels need Triton, if only to be compiled")

from ingot.kernels.triton.compiler import compile_all, compile_jobs
from tools import gpu_page


def test_table_is_written_between_its_markers_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- accuracy -->\nold\n<!-- end accuracy -->\nafter\n")
    accuracy = {"silu": {"cases": 2, "forward": 0.25, "backward": None}}
    for _ in range(2):
        gpu_page.write_accuracy(page, accuracy)
    before, row, after = page.read_text().partition("| silu | 2 | 0.25 | - |")
    assert row
    assert before.startswith("before\n<!-- accuracy -->\n\nTriton ")
    assert after == "\n\n<!-- end accuracy -->\nafter\n"


def test_page_has_a_marker_for_every_section() -> None:
    text = gpu_page.PAGE.read_text()
    for name in ("summary", "kernels", "ceilings", "roofline", "traffic", "accuracy"):
        assert text.count(f"<!-- {name} -->") == text.count(f"<!-- end {name} -->") == 1


def test_first_launches_are_sorted_by_kernel_and_target() -> None:
    kernels = compile_all(compile_jobs(("silu",), ("sm_80", "sm_90"), all_configs=False))
    rows = gpu_page.first_launches(list(reversed(kernels)))
    assert [(row.kernel, row.target) for row in rows] == [
        *(("activation", "sm_80"), ("activation", "sm_90")),
        *(("activation_backward", "sm_80"), ("activation_backward", "sm_90")),
    ]
