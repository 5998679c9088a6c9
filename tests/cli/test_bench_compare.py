"""`ingot bench compare` with systems that only repeat tokens."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from ingot.bench import environment, machine
from ingot.bench.compare import CompareRow
from ingot.cli import bench_compare, main
from ingot.interop import hf
from ingot.nn import Decoder, preset
from tests.bench.row import PEAKS

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
        dtype="int4 g128 zp",
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
        memory_mb=1234.0,
        peak_memory_mb=12345.0,
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
