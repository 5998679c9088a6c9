"""Runs on a pipeline have the bits of a run in one process."""

from __future__ import annotations

from pathlib import Path

from tests.parallel.comparison import Jobs, compare

CASES = ["staged-dense", "staged-gpt2", "staged-moe"]
PP = {"pp": 2}
INTERLEAVED = {"pp": 2, "schedule": "interleaved_1f1b"}
ZERO_BUBBLE = {"pp": 2, "schedule": "interleaved_zero_bubble"}

JOBS: Jobs = {
    1: [{"name": "one", "cases": CASES}],
    2: [
        {"name": "1f1b", "cases": CASES, "parallel": PP},
        {"name": "interleaved", "cases": CASES, "parallel": INTERLEAVED},
        {"name": "zero-bubble", "cases": CASES, "parallel": ZERO_BUBBLE},
        {"name": "changed", "cases": ["staged-moe"], "parallel": INTERLEAVED, "stop": 5},
        {
            "name": "wrong",
            "cases": ["staged-dense"],
            "parallel": PP,
            "fault": "dropout of the last forward",
        },
    ],
    4: [
        {"name": "fsdp", "cases": ["staged-moe"], "parallel": PP},
        {"name": "dp", "cases": ["staged-dense"], "parallel": {"dp": 2, **ZERO_BUBBLE}},
    ],
    0: [{"name": "changed", "cases": ["staged-moe"], "resume": True}],
}


def test_runs_on_a_pipeline_have_the_bits_of_one_process(tmp_path: Path) -> None:
    """One test, as the runs are compared with each other: see `JOBS`."""
    compared = compare(JOBS, tmp_path)
    assert compared.pop(("wrong", "staged-dense"))
    assert compared == {key: [] for key in compared}
    assert len(compared) == 12
