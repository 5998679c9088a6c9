"""`ingot bench ops` on tiny workloads."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ingot.bench import machine, ops, workloads
from ingot.bench.ops import OpBench
from ingot.bench.results import read
from ingot.bench.workloads import Workload, floats
from ingot.cli import bench_ops, main
from tests.bench.row import PEAKS, ROW

TINY = (
    Workload("silu", "8x64", "fp32", floats((8, 64))),
    Workload("rms_norm", "4x64", "fp32", floats((4, 64), (64,))),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small workloads in 4 MiB, on a machine with given peaks."""
    monkeypatch.setattr(workloads, "WORKLOADS", TINY)
    monkeypatch.setattr(ops, "OpBench", partial(OpBench, size=2**22))
    monkeypatch.setattr(machine, "peaks", lambda **_: PEAKS)
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
        *("bound", "roofline_fraction", "vs_eager", "vs_compile", "batch_invariant"),
    }
    assert all(keys <= set(row) for row in found["rows"])
    assert {row["op"] for row in found["rows"]} == {"silu", "rms_norm"}
    assert {"aten", "reference", "compile"} <= {row["provider"] for row in found["rows"]}


@pytest.mark.usefixtures("tiny")
def test_names_select_the_ops_in_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_table_of_ops_fits_100_columns() -> None:
    row = replace(
        ROW,
        op="linear_token_logprobs",
        shape="2048x576x49152",
        provider="reference",
        p50_us=1512345.0,
        gflops=3181.0,
        bound="compute",
        roofline_fraction=1.234,
        vs_eager=1492.3,
        vs_compile=1492.3,
    )
    page = io.StringIO()
    Console(file=page, width=100).print(bench_ops._table([row, replace(row, provider="compile")]))
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
