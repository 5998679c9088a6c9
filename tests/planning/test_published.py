from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import DataError
from ingot.planning.published import (
    MeasuredRun,
    parse_run,
    read_activation_memory,
    read_excluded,
    read_runs,
)
from tests.planning.conftest import DATA

ROW: dict[str, Any] = {
    **{"gpu": "h100", "gpus": 8, "layers": 2, "dim": 64, "heads": 4, "kv_heads": 4},
    **{"head_dim": 16, "ffn_dim": 256, "vocab_size": 512, "seq_len": 128},
    **{"global_batch_size": 8, "dp": 8, "step_s": 0.5},
}
TABLES = ("published_runs.csv", "blind_runs.csv")


def test_the_tables_have_the_runs_that_the_documentation_counts(runs: list[MeasuredRun]) -> None:
    excluded = read_excluded(DATA / "published_runs.csv")
    assert len(runs) == 731
    assert len(runs) + len(excluded) == 850
    assert sum(not run.is_moe for run in runs) == 577
    assert len(read_runs(DATA / "blind_runs.csv")) == 45


def test_every_excluded_row_has_its_reason() -> None:
    reasons = read_excluded(DATA / "published_runs.csv").values()
    assert all(len(reason) > 10 for reason in reasons)


@pytest.mark.parametrize("name", TABLES)
def test_every_plan_is_possible(name: str) -> None:
    for run in read_runs(DATA / name):
        assert run.plan.gpus == run.cluster.gpus
        samples = run.plan.data_ranks * run.plan.micro_batch_size
        assert run.workload.global_batch_size % samples == 0, run.id


@pytest.mark.parametrize("name", TABLES)
def test_no_run_exceeds_the_peak_of_its_gpu(name: str) -> None:
    for run in read_runs(DATA / name):
        gpu = run.cluster.accelerator
        peaks = {"bf16": gpu.bf16_tflops, "fp8": gpu.fp8_tflops, "fp4": gpu.fp4_tflops}
        peak = peaks[run.workload.precision.removeprefix("mx")] or 0
        rate = run.tokens_per_gpu_s * run.workload.model.flops_per_token(run.workload.seq_len)
        assert 0.005 < rate / (peak * 1e12) < 0.75, (run.id, rate)


def test_models_have_the_size_in_their_name(runs: list[MeasuredRun]) -> None:
    checked = 0
    for run in runs:
        size = re.search(r"(\d+(?:\.\d+)?)b\b", run.model.lower().replace("_", " "))
        if not size or "proxy" in run.model or "MPT" in run.model:
            continue
        params = run.workload.model.params / 1e9
        assert params == pytest.approx(float(size[1]), rel=0.25), run.model
        checked += 1
    assert checked > 200


@pytest.mark.parametrize("name", [*TABLES, "published_memory.csv", "sources.md"])
def test_the_data_names_no_place_on_a_machine(name: str) -> None:
    text = (DATA / name).read_text()
    assert not re.search(r"(?<![\w.])/(?:home|work|tmp|root|mnt|data)/", text)
    assert "Aleph" not in text


def test_the_sources_are_named() -> None:
    text = (DATA / "sources.md").read_text()
    for name in TABLES:
        with (DATA / name).open() as file:
            sources = {row["source"] for row in csv.DictReader(file)}
        assert all(f"**{source}**" in text for source in sources), sources


def test_columns_that_are_missing_have_defaults() -> None:
    run = parse_run(ROW, "here")
    assert (run.plan.tp, run.plan.recompute, run.plan.software.attention) == (1, "none", "fused")
    assert run.memory_gib is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_s": "fast"}, "here: not a run"),
        ({"step_s": 0}, "step_s must be above 0"),
        ({"layers": "two"}, "here: not a run"),
        ({"dp": 4}, "must be 8 GPUs, got 4"),
    ],
)
def test_a_row_that_is_not_a_run_is_an_error(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_run({**ROW, **change}, "here")


def test_a_table_without_its_columns_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("gpu,gpus\nh100,8\n")
    with pytest.raises(DataError, match="columns are missing: dim"):
        read_runs(tmp_path / "runs.csv")
    with pytest.raises(DataError, match="cannot be read"):
        read_runs(tmp_path / "none.csv")


def test_memory_by_part_refers_to_runs(runs: list[MeasuredRun]) -> None:
    parts = read_activation_memory(DATA / "published_memory.csv", runs)
    assert {part.run.source for part in parts} == {"C"}
    assert len(parts) == 8
