from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ingot.bench.results import (
    Record,
    append,
    called_rows,
    family_means,
    geometric_mean,
    latest,
    prepare,
    read,
)
from ingot.core.errors import IngotError
from tests.bench.row import ROW, RUN

ATEN = replace(ROW, provider="aten", roofline_fraction=0.125, vs_eager=1.0, batch_invariant=False)


def test_appended_rows_are_read_back_under_one_header(tmp_path: Path) -> None:
    path = tmp_path / "results" / "ops.csv"
    later = replace(RUN, date="2026-11-16T12:00:00+00:00")
    for run, rows in ((RUN, [ROW, ATEN]), (later, [ATEN])):
        prepare(path)
        append(path, run, rows)
    lines = path.read_text().splitlines()
    assert [line.startswith("date,cpu,isa,torch,ingot,op,") for line in lines] == [
        True,
        *[False] * 3,
    ]
    assert read(path) == [Record(RUN, ROW), Record(RUN, ATEN), Record(later, ATEN)]


def test_file_with_other_columns_is_rejected_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "ops.csv"
    path.write_text("date,speed\n")
    with pytest.raises(IngotError, match="columns must be those of this version"):
        prepare(path)
    assert path.read_text() == "date,speed\n"


def test_latest_returns_last_run_of_each_workload_on_last_machine() -> None:
    later = replace(RUN, date="2026-11-16T12:00:00+00:00")
    elsewhere = replace(RUN, cpu="Ryzen, 8 cores", date="2026-11-17T12:00:00+00:00")
    norm = replace(ROW, op="rms_norm", family="norm")
    records = [
        *(Record(RUN, ROW), Record(RUN, ATEN), Record(RUN, norm)),
        Record(elsewhere, ROW),
        Record(later, ROW),
    ]
    assert latest(records) == [Record(RUN, norm), Record(later, ROW)]


def test_called_rows_are_the_first_of_each_workload() -> None:
    wide = replace(ROW, shape="32x128")
    assert called_rows([ROW, ATEN, wide, replace(wide, provider="aten")]) == [ROW, wide]


def test_family_means_use_called_rows() -> None:
    faster = replace(ROW, shape="32x128", roofline_fraction=1.0, vs_eager=8.0, vs_compile=3.0)
    norm = replace(ROW, op="rms_norm", family="norm", vs_eager=None)
    activation, norms = family_means([norm, ROW, ATEN, faster])
    assert (activation.family, activation.workloads) == ("activation", 2)
    assert activation.roofline_fraction == pytest.approx(0.5)
    assert activation.vs_eager == pytest.approx(4.0)
    assert activation.vs_compile == pytest.approx(3.0)
    assert (norms.family, norms.vs_eager) == ("norm", None)


def test_geometric_mean_ignores_nothing_but_none() -> None:
    assert geometric_mean([1.0, 10.0, 100.0]) == pytest.approx(10.0)
    assert geometric_mean([]) is None
