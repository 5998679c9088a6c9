from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ingot.bench.results import (
    Record,
    append,
    geometric_mean,
    latest,
    means,
    prepare,
    read,
    served,
)
from ingot.core.errors import IngotError
from tests.bench.row import ROW, RUN

ATEN = replace(ROW, provider="aten", share_of_limit=0.125, vs_aten=1.0, batch_invariant=False)


def test_what_is_appended_is_read_back_under_one_heading(tmp_path: Path) -> None:
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


def test_a_file_with_other_columns_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "ops.csv"
    path.write_text("date,speed\n")
    with pytest.raises(IngotError, match="other columns"):
        prepare(path)
    assert path.read_text() == "date,speed\n"


def test_the_latest_are_the_last_of_each_workload_on_the_last_machine() -> None:
    later = replace(RUN, date="2026-11-16T12:00:00+00:00")
    elsewhere = replace(RUN, cpu="Ryzen, 8 cores", date="2026-11-17T12:00:00+00:00")
    norm = replace(ROW, op="rms_norm", family="norm")
    records = [
        *(Record(RUN, ROW), Record(RUN, ATEN), Record(RUN, norm)),
        Record(elsewhere, ROW),
        Record(later, ROW),
    ]
    assert latest(records) == [Record(RUN, norm), Record(later, ROW)]


def test_the_first_row_of_a_workload_is_the_op_as_it_is_called() -> None:
    wide = replace(ROW, shape="32x128")
    assert served([ROW, ATEN, wide, replace(wide, provider="aten")]) == [ROW, wide]


def test_means_are_of_what_is_called() -> None:
    faster = replace(ROW, shape="32x128", share_of_limit=1.0, vs_aten=8.0, vs_compile=3.0)
    norm = replace(ROW, op="rms_norm", family="norm", vs_aten=None)
    activation, norms = means([norm, ROW, ATEN, faster])
    assert (activation.family, activation.workloads) == ("activation", 2)
    assert activation.share_of_limit == pytest.approx(0.5)
    assert activation.vs_aten == pytest.approx(4.0)
    assert activation.vs_compile == pytest.approx(3.0)
    assert (norms.family, norms.vs_aten) == ("norm", None)


def test_the_geometric_mean() -> None:
    assert geometric_mean([1.0, 10.0, 100.0]) == pytest.approx(10.0)
    assert geometric_mean([]) is None
