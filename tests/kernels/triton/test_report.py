from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingot.kernels.triton import report
from ingot.kernels.triton.compiler import CompiledKernel, compile_all, jobs
from ingot.kernels.triton.disassembly import CodeStats


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
    assert "0 spill, 0 violations" in report.summary([fact], 1)


def fact(config: str, **changes: Any) -> CompiledKernel:
    code = CodeStats(
        registers=64, spills=0, loads={128: 2}, stores={}, tensor_ops={"HGMMA": 1}, async_copies=0
    )
    known: dict[str, Any] = {
        **{
            "name": "a",
            "kernel": "k",
            "bound_by": "tensor cores",
            "scalar_loads": 0,
            "target": "sm_90",
        },
        **{"num_warps": 4, "num_stages": 1, "shared_bytes": 0, "occupancy": 0.5, "stats": code},
    }
    return CompiledKernel(config=config, **known | changes)


def test_defaults_are_ranked_by_what_was_compiled() -> None:
    spilled = replace(fact("").stats, spills=1)
    facts = [
        fact("BLOCK_M=64 BLOCK_N=64"),
        fact("BLOCK_M=128 BLOCK_N=256", occupancy=0.25),
        fact("BLOCK_M=128 BLOCK_N=128"),  # 256 columns count as no more
        fact("BLOCK_M=64 BLOCK_N=128"),
        fact("BLOCK_M=64 BLOCK_N=128", name="b", stats=spilled),  # wrong in one launch of two
    ]
    assert report.rank_configs(facts) == {
        "k": {
            "sm_90": ["BLOCK_M=128 BLOCK_N=128", "BLOCK_M=128 BLOCK_N=256", "BLOCK_M=64 BLOCK_N=64"]
        }
    }
    wide = replace(fact("").stats, tensor_ops={}, loads={128: 4})
    facts = [
        fact("num_warps=4", bound_by="bandwidth", stats=wide, occupancy=0.4),
        fact("num_warps=8", bound_by="bandwidth", stats=wide, occupancy=0.6),
        fact("num_warps=2", bound_by="bandwidth", occupancy=1.0),
        fact("num_warps=8", bound_by="bandwidth", name="b", occupancy=0.4),
    ]
    assert report.rank_configs(facts)["k"]["sm_90"] == ["num_warps=2", "num_warps=4", "num_warps=8"]
