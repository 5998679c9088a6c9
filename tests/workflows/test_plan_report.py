from __future__ import annotations

from pathlib import Path

import pytest

from ingot.observe import plot
from ingot.planning.cost import PARTS
from ingot.workflows import plan_report
from ingot.workflows.plan import PlanReport, plan
from ingot.workflows.plan_report import COLORS, COLUMNS, row, scaling, write_page
from tests.observe.parsed_html import ParsedHtml


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return plan("llama3-8b", gpu="h100", gpus=64, seq_len=8192, global_batch_size=512)


def test_every_part_of_a_step_has_its_color() -> None:
    assert set(COLORS) == set(PARTS)
    assert len(set(COLORS.values())) == len(PARTS)


def test_a_row_has_a_cell_for_each_column(report: PlanReport) -> None:
    assert len(row(report.first)) == len(COLUMNS)


def test_scaling_loses_throughput_but_little(
    report: PlanReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_report, "SCALES", (8, 64, 1024))
    weak = scaling(report, is_weak=True)
    assert [point.gpus for point in weak] == [8, 64, 1024]
    rates = [point.estimate.tokens_per_gpu_s for point in weak]
    assert rates[1] > rates[2] > 0.7 * rates[0]
    strong = scaling(report, is_weak=False)
    assert strong[-1].estimate.tokens_per_gpu_s < rates[-1]


@pytest.mark.skipif(not plot.available(), reason="needs matplotlib")
def test_the_page_has_tables_and_figures(
    report: PlanReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_report, "SCALES", (8, 64))
    write_page(report, tmp_path / "plan.html")
    html = ParsedHtml((tmp_path / "plan.html").read_text())
    assert "Where the time goes" in html.text
    assert report.first.plan.describe() in html.text
    assert {path.name for path in tmp_path.iterdir()} == {
        "plan.html",
        *(f"plan-{name}.{kind}" for name in ("steps", "scaling") for kind in ("png", "svg")),
    }
