from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ingot.kernels.triton import report
from ingot.kernels.triton.compiler import CompiledKernel, compile_all, compile_jobs
from ingot.kernels.triton.disassembly import CodeStats


@pytest.mark.slow
def test_ceilings_compare_our_main_loops_with_the_tutorials() -> None:
    rows = {row["kernel"]: row for row in report.ceiling_rows()}
    assert list(rows) == [
        *("gated_linear", "linear", "tutorial 03, matmul"),
        *("attention", "tutorial 06, attention"),
    ]
    for row in rows.values():
        assert row["MMA per iteration"] > 0
        assert row["async copies per iteration"] > 0
        assert row["spills"] == 0
    assert rows["linear"]["ceiling"] == "100% of peak"


def test_summary_counts_spills_and_violations() -> None:
    (compiled,) = compile_all(compile_jobs(("silu",), ("sm_80",), all_configs=False)[:1])
    assert "1 binaries of 1 kernels in 1 configurations for 1 targets" in report.summary(
        [compiled], 1
    )
    assert "0 with spills, 0 violations" in report.summary([compiled], 1)


def compiled_kernel(config: str, **changes: Any) -> CompiledKernel:
    stats = CodeStats(
        registers=64, spills=0, loads={128: 2}, stores={}, tensor_ops={"HGMMA": 1}, async_copies=0
    )
    fields: dict[str, Any] = {
        **{"name": "a", "kernel": "k", "target": "sm_90", "bound_by": "tensor cores"},
        **{"scalar_loads": 0, "num_warps": 4, "num_stages": 1, "shared_bytes": 0},
        **{"occupancy": 0.5, "stats": stats},
    }
    return CompiledKernel(config=config, **fields | changes)


def test_gemm_configs_rank_by_intensity_and_violations_are_left_out() -> None:
    spilled = replace(compiled_kernel("").stats, spills=1)
    kernels = [
        compiled_kernel("BLOCK_M=64 BLOCK_N=64"),
        compiled_kernel("BLOCK_M=128 BLOCK_N=256", occupancy=0.25),
        compiled_kernel("BLOCK_M=128 BLOCK_N=128"),  # 256 columns do not score higher
        compiled_kernel("BLOCK_M=64 BLOCK_N=128"),
        compiled_kernel(
            "BLOCK_M=64 BLOCK_N=128", name="b", stats=spilled
        ),  # spills in one launch of two
    ]
    assert report.rank_configs(kernels) == {
        "k": {
            "sm_90": ["BLOCK_M=128 BLOCK_N=128", "BLOCK_M=128 BLOCK_N=256", "BLOCK_M=64 BLOCK_N=64"]
        }
    }


def test_bandwidth_bound_configs_rank_by_bits_in_flight_of_the_worst_launch() -> None:
    wide = replace(compiled_kernel("").stats, tensor_ops={}, loads={128: 4})
    kernels = [
        compiled_kernel("num_warps=4", bound_by="bandwidth", stats=wide, occupancy=0.4),
        compiled_kernel("num_warps=8", bound_by="bandwidth", stats=wide, occupancy=0.6),
        compiled_kernel("num_warps=2", bound_by="bandwidth", occupancy=1.0),
        compiled_kernel("num_warps=8", bound_by="bandwidth", name="b", occupancy=0.4),
    ]
    assert report.rank_configs(kernels)["k"]["sm_90"] == [
        "num_warps=2",
        "num_warps=4",
        "num_warps=8",
    ]
