from __future__ import annotations

from pathlib import Path

import pytest

from ingot.kernels.triton import report
from ingot.kernels.triton.compiler import compile_all, jobs


def test_a_table_is_written_between_its_marks_and_nowhere_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- numbers -->\nold\n<!-- end numbers -->\nafter\n")
    errors = {"silu": {"cases": 2, "forward": 0.25, "backward": None}}
    for _ in range(2):
        report.write_numbers(page, errors)
    before, row, after = page.read_text().partition("| silu | 2 | 0.25 | - |")
    assert row
    assert before.startswith("before\n<!-- numbers -->\n\nBy `ingot kernels --numbers`")
    assert after == "\n\n<!-- end numbers -->\nafter\n"


@pytest.mark.slow
def test_ours_are_beside_the_plainest_on_the_tensor_cores_of_sm_90() -> None:
    rows = {row["kernel"]: row for row in report.ceiling_rows()}
    assert list(rows) == [
        *("linear", "linear_swiglu", "tutorial 03, matmul"),
        *("attention", "tutorial 06, attention"),
    ]
    for row in rows.values():
        assert row["products an iteration"] > 0
        assert row["copies an iteration"] > 0
        assert row["spills"] == 0
    assert rows["linear"]["ceiling"] == "100% of peak"


def test_the_summary_counts_what_spills() -> None:
    (fact,) = compile_all(jobs(("silu",), ("sm_80",), every_config=False)[:1])
    assert "1 binaries of 1 kernels in 1 configurations for 1 targets" in report.summary([fact], 1)
    assert "0 spill, 0 faults" in report.summary([fact], 1)
