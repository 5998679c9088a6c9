"""`ingot bench ops` and `compare`, in this process on tiny workloads."""

from __future__ import annotations

import csv
import io
import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ingot.bench import environment, machine, ops, workloads
from ingot.bench.compare import CompareRow
from ingot.bench.ops import OpBench
from ingot.bench.peaks import Peak, Peaks
from ingot.bench.results import read
from ingot.bench.workloads import Workload, floats
from ingot.cli import bench_compare, bench_ops, main
from ingot.interop import hf
from ingot.nn import Decoder, preset
from tests.bench.row import ROW
from tests.cli.conftest import Run

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


COUNTS = """
from peers.protocol import LoadedModel, serve

def generate(prompts, output_len):
    return 0.001, [[token] * output_len for token, *_ in prompts]

serve(lambda model: LoadedModel("1.0", "bf16", generate))
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model directory, an `ingot` that repeats tokens, and a system that is not installed."""
    folder = tmp_path / "benchmarks/peers"
    folder.mkdir(parents=True)
    shutil.copy(environment.peers_folder() / "protocol.py", folder)
    (folder / "ingot.py").write_text(COUNTS)
    (folder / "vllm.txt").write_text("")
    monkeypatch.setattr(environment, "peers_folder", lambda: folder)
    monkeypatch.setattr(machine, "peaks", lambda **_: PEAKS)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hf.save(Decoder.from_config(preset("tiny"), seed=0), tmp_path)
    return tmp_path


def run_compare(*arguments: str) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["bench", "compare", *arguments, "--rounds", "2", "--output-len", "3"])
    assert exit.value.code == 0


def test_systems_are_compared_and_results_appended(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_compare(str(model), "--json", "--batch-size", "2", "--results", str(model))
    found = json.loads(capsys.readouterr().out)
    assert found["header"]["peaks"]["read_bandwidth"]["value"] == 4.0
    ours, vllm = found["rows"]
    assert (ours["system"], ours["batch_size"], ours["output_len"], ours["matching_tokens"]) == (
        "ingot",
        2,
        3,
        3,
    )
    assert ours["speedup"] == 1.0
    assert ours["tokens_per_s"] > 0
    assert "not installed" in vllm["error"]
    run_compare(str(model), "ingot", "--results", str(model))
    text = capsys.readouterr().out
    assert "1.00x" in text
    assert "p50 [p20-p80]" in " ".join(text.split())
    assert "vllm" not in text
    lines = list(csv.DictReader((model / "compare.csv").read_text().splitlines()))
    assert [line["system"] for line in lines] == ["ingot", "vllm", "ingot"]
    assert lines[1]["tokens_per_s"] == ""


def test_failed_system_is_named_below_the_table(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_compare(str(model))
    assert "vllm: not installed: run `python" in capsys.readouterr().out


def test_table_of_systems_fits_100_columns() -> None:
    row = CompareRow(
        system="transformers",
        version="2026.4.1.0-3408-ab01d1771e4",
        dtype="bf16",
        model="tiny",
        batch_size=1,
        input_len=2,
        output_len=3,
        rounds=4,
        tokens_per_s=1234.5,
        p20=1111.1,
        p80=1333.3,
        speedup=12.34,
        speedup_p20=11.11,
        speedup_p80=13.33,
        ttft_ms=1234.5,
        load_s=123.4,
        memory_mb=12345.0,
        matching_tokens=128,
        read_gbs=40.0,
        roofline_tokens_per_s=99.0,
        roofline_fraction=0.99,
    )
    page = io.StringIO()
    Console(file=page, width=100).print(bench_compare._table([row]))
    text = page.getvalue()
    assert "…" not in text
    for cell in ("transformers", "1234 [1111-1333]", "12.3x", "12345 MB", "123 s"):
        assert cell in text


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("ops", "rmsnorm"), "did you mean 'rms_norm'?"),
        (("ops", "silu", "--plot", "roofline.jpg"), "cannot draw a '.jpg' file"),
        (("opps",), "opps"),
        (("compare", "there-is-none"), "there is no there-is-none"),
        (("compare", ".", "vlm"), "did you mean 'vllm'?"),
        (
            ("compare", ".", "--batch-size", "0"),
            "GenerationTask.batch_size: expected a number from 1 to 1024, got 0",
        ),
    ],
)
def test_invalid_arguments_fail_before_measuring(
    cli: Run, arguments: tuple[str, ...], what: str
) -> None:
    result = cli("bench", *arguments)
    assert result.returncode == 2
    assert what in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_fails_before_measuring(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["bench", "ops", "silu", "--device", "cuda"])
    assert exit.value.code == 2
    assert "hint: " in capsys.readouterr().err
