"""What the time of a window is divided into, from traces written by hand and by torch.profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ingot import ops
from ingot.core import spans
from ingot.core.errors import IngotError
from ingot.observe.trace import (
    SHORT_US,
    Kind,
    TraceEvent,
    WindowProfile,
    profile_window,
    read_trace,
)


def write(path: Path, *events: tuple[Any, ...]) -> Path:
    """Events of (name, category, start, duration), in a window of 1000 us."""
    rows = [("window", "user_annotation", 0, 1000, 1), *((*event, 1)[:5] for event in events)]
    entries = [
        {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid}
        for name, cat, ts, dur, tid in rows
    ]
    entries[0]["name"] = spans.WINDOW
    path.write_text(json.dumps({"traceEvents": entries}))
    return path


def shares(found: WindowProfile) -> dict[Kind, float]:
    return {kind: round(found.share(kind), 3) for kind in found.kinds}


def test_every_instant_has_one_owner(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.json",
        (spans.STEP, "user_annotation", 0, 1000),
        ("autograd::engine::evaluate_function: MmBackward0", "cpu_op", 0, 150),
        ("aten::mm", "cpu_op", 0, 100),
        ("aten::resolve_conj", "cpu_op", 10, 30),  # inside
        ("aten::mm", "cpu_op", 100, 5),  # short
        ("aten::clone", "cpu_op", 200, 50),
        (spans.DATA, "user_annotation", 300, 100),
        (f"{spans.COMMUNICATION}: all_gather", "user_annotation", 400, 120),
        ("aten::copy_", "cpu_op", 450, 60),  # inside
        ("FSDP::pre_forward", "user_annotation", 600, 300),  # a name for what is inside
        ("ingot::silu", "cpu_op", 700, 40),
        ("aten::empty", "cpu_op", 701, 5),  # allocates its result
        ("aten::mm", "cpu_op", 0, 1000, 2),  # another thread
        ("aten::mm", "cpu_op", 2000, 1000),  # after the window
    )
    found = profile_window(read_trace(path))
    assert found.steps == 1
    assert shares(found) == {
        Kind.INGOT: 0.04,
        Kind.OTHER: 0.1,
        Kind.COPIES: 0.05,
        Kind.COMMUNICATION: 0.12,
        Kind.DATA: 0.1,
        Kind.CALLS: 0.005,
        Kind.PYTHON: 0.585,
    }
    assert found.bottleneck == "python"
    assert [(op.name, op.count) for op in found.ops[1:3]] == [("aten::mm", 2), ("aten::clone", 1)]


def test_an_op_that_runs_python_has_the_time_of_what_is_inside(tmp_path: Path) -> None:
    path = write(
        tmp_path / "trace.json",
        ("ingot::linear", "cpu_op", 0, 400),
        ("GeneratedBackwardFor_ingot_linear_default", "cpu_op", 100, 200),
        ("GeneratedBackwardFor_ingot_linear_defaultBackward", "cpu_op", 450, 350),
        ("ingot::linear_backward", "cpu_op", 500, 300),
        ("aten::mm", "cpu_op", 600, 50),
    )
    found = profile_window(read_trace(path))
    assert shares(found) == {Kind.INGOT: 0.2, Kind.OTHER: 0.05, Kind.PYTHON: 0.75}
    assert [op.name for op in found.ops] == ["ingot::linear", "aten::mm"]


def test_kernels_of_a_gpu_own_the_time_in_which_they_run() -> None:
    def event(name: str, cat: str, ts: float, dur: float, op: int = 0) -> TraceEvent:
        found = TraceEvent(
            name=name, ph="X", cat=cat, tid=1 if cat != "kernel" else 7, ts=ts, dur=dur
        )
        found.args.external_id = op
        return found

    found = profile_window(
        [
            event(spans.WINDOW, "user_annotation", 0, 1000),
            event("ingot::rms_norm", "cpu_op", 0, 10, op=3),  # starts the kernel
            event("_rms_norm_kernel", "kernel", 50, 300, op=3),
            event("ampere_sgemm", "kernel", 200, 300),  # on another stream
            event("ncclDevKernel_AllGather", "kernel", 500, 100),
            event(spans.DATA, "user_annotation", 400, 400),
        ]
    )
    assert shares(found) == {
        Kind.INGOT: 0.3,
        Kind.OTHER: 0.15,
        Kind.COMMUNICATION: 0.1,
        Kind.DATA: 0.2,
        Kind.PYTHON: 0.25,
    }


def test_a_recorded_window(tmp_path: Path) -> None:
    x = torch.randn(512, 512)
    ops.silu(x)
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
        record_function(spans.WINDOW),
    ):
        for _ in range(3):
            with record_function(spans.STEP):
                ops.silu(x)
                torch.matmul(x, x)
    path = tmp_path / "trace.json.gz"
    recorded.export_chrome_trace(str(path))
    found = profile_window(read_trace(path))
    by_name = {op.name: op for op in found.ops}
    assert found.steps == by_name["ingot::silu"].count == by_name["aten::matmul"].count == 3
    assert by_name["aten::matmul"].kind is Kind.OTHER
    assert by_name["aten::matmul"].allocated == 3 * x.nbytes
    assert by_name["ingot::silu"].seconds > 3 * SHORT_US * 1e-6
    assert found.bottleneck == "compute"


def test_what_is_not_a_trace_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    for content in (b"{", gzip.compress(b'{"traceEvents": 3}'), gzip.compress(b"{}")[:-4]):
        path.write_bytes(content)
        with pytest.raises(IngotError, match=r"trace\.json\.gz: not a trace"):
            read_trace(path)
    with pytest.raises(IngotError, match="no window"):
        profile_window([])
