"""The verb: mistakes in a process of its own, measuring in this one on tiny workloads."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ingot.bench import ops, peaks, workloads
from ingot.bench.ops import Bench
from ingot.bench.peaks import Peak, Peaks
from ingot.bench.results import read
from ingot.bench.workloads import Workload, floats
from ingot.cli import bench as module
from ingot.cli import main
from tests.bench.row import ROW

Run = Callable[..., subprocess.CompletedProcess[str]]

PEAK = Peak(value=4.0, low=1.0, typical=2.0, high=3.0)
PEAKS = Peaks(
    method=1,
    measured=datetime(2026, 11, 15, tzinfo=UTC),
    read_bandwidth=PEAK,
    matmul={"fp32": PEAK, "bf16": PEAK, "int8": None},
)
TINY = (
    Workload("silu", "8x64", "fp32", floats((8, 64))),
    Workload("rms_norm", "4x64", "fp32", floats((4, 64), (64,))),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small workloads in 4 MiB, on a machine whose peaks are known."""
    monkeypatch.setattr(workloads, "WORKLOADS", TINY)
    monkeypatch.setattr(ops, "Bench", partial(Bench, size=2**22))
    monkeypatch.setattr(peaks, "peaks", lambda: PEAKS)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["bench", "ops", "--seconds", "0.002", *arguments])
    assert exit.value.code == 0


@pytest.mark.usefixtures("tiny")
def test_json_has_a_header_and_rows(capsys: pytest.CaptureFixture[str]) -> None:
    run("--json")
    found = json.loads(capsys.readouterr().out)
    assert {"date", "cpu", "isa", "torch", "ingot", "peaks"} == set(found["header"])
    assert found["header"]["peaks"]["read_bandwidth"]["value"] == 4.0
    keys = {
        *("op", "shape", "dtype", "provider", "p20_us", "p50_us", "p80_us", "gbs", "gflops"),
        *("limit", "share_of_limit", "vs_aten", "vs_compile", "exact"),
    }
    assert all(keys <= set(row) for row in found["rows"])
    assert {row["op"] for row in found["rows"]} == {"silu", "rms_norm"}
    assert {"aten", "reference", "compile"} <= {row["provider"] for row in found["rows"]}


@pytest.mark.usefixtures("tiny")
def test_names_choose_and_the_tables_show(capsys: pytest.CaptureFixture[str]) -> None:
    run("activation")
    text = capsys.readouterr().out
    assert "silu" in text
    assert "8x64" in text
    assert "rms_norm" not in text
    assert "geometric means" in text


@pytest.mark.usefixtures("tiny")
def test_results_and_plot_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "roofline.png"
    run("silu", "--results", str(tmp_path), "--plot", str(plot))
    run("rms_norm", "--results", str(tmp_path))
    assert plot.stat().st_size > 1000
    text = (tmp_path / "ops.csv").read_text()
    assert text.count("date,cpu") == 1
    ops_in_order = dict.fromkeys(record.row.op for record in read(tmp_path / "ops.csv"))
    assert list(ops_in_order) == ["silu", "rms_norm"]


def test_the_table_fits_a_hundred_columns() -> None:
    row = replace(
        ROW,
        op="linear_token_logprobs",
        shape="2048x576x49152",
        provider="reference",
        p50_us=1512345.0,
        gflops=3181.0,
        limit="compute",
        share_of_limit=1.234,
        vs_aten=1492.3,
        vs_compile=1492.3,
    )
    page = io.StringIO()
    Console(file=page, width=100).print(module._table([row, replace(row, provider="compile")]))
    text = page.getvalue()
    assert "…" not in text
    for cell in (
        "linear_token_logprobs",
        "2048x576x49152",
        "1512345",
        "3181 GF/s",
        "123%",
        "1492x",
    ):
        assert cell in text
    assert text.count("2048x576x49152") == 1


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("ops", "rmsnorm"), "did you mean 'rms_norm'?"),
        (("ops", "silu", "--plot", "roofline.jpg"), "cannot draw a '.jpg' file"),
        (("opps",), "opps"),
    ],
)
def test_mistakes_are_said_before_anything_is_measured(
    ingot: Run, arguments: tuple[str, ...], what: str
) -> None:
    result = ingot("bench", *arguments)
    assert result.returncode == 2
    assert what in result.stderr
