"""The report of a run: complete, self-contained, and safe for untrusted content."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ingot.observe import plot
from ingot.observe.history import RunHistory
from ingot.observe.page import NAME, Section
from ingot.observe.report import render, write
from tests.observe.fake_runs import LINES, run
from tests.observe.parsed_html import ParsedHtml


def test_a_report_has_all_parts(tmp_path: Path) -> None:
    path = write(run(tmp_path / "run", LINES, steps=9), "stopped")
    assert path == tmp_path / "run" / NAME
    found = ParsedHtml(path.read_text())
    for text in ("made", "stopped", "4 / 9", "50.00%", "2.5", "a loss of nan", "16", "25.0%"):
        assert text in found.text, text
    assert "--resume" in found.text
    assert {"curves.png", "curves.svg"} <= {file.name for file in path.parent.iterdir()}


def test_a_report_loads_nothing(tmp_path: Path) -> None:
    text = write(run(tmp_path, LINES), "finished").read_text()
    tags = ParsedHtml(text).tags
    assert {"script", "link", "iframe", "object"}.isdisjoint(tag for tag, _ in tags)
    addresses = [a[key] for _, a in tags for key in ("src", "href") if key in a]
    assert [str(address)[:26] for address in addresses] == ["data:image/svg+xml;base64,"]
    assert not re.search(r"url\(|@import|https?:", text)


def test_values_of_a_run_are_escaped(tmp_path: Path) -> None:
    attack = "</pre><script>alert(1)</script><img src=x onerror=y>'\"{{ 7 * 7 }}"
    lines = [*LINES, {"step": 4, "skipped": attack}]
    history = RunHistory.read(run(tmp_path, lines, name=attack))
    text = render(history, attack, Section())
    found = ParsedHtml(text)
    assert "script" not in {tag for tag, _ in found.tags}
    assert "img" not in {tag for tag, _ in found.tags}
    assert found.text.count(attack) >= 3
    assert "<b>some</b>" in found.text


def test_a_report_without_matplotlib_has_no_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "available", lambda: False)
    text = write(run(tmp_path, LINES), "finished").read_text()
    assert "<img" not in text
    assert "No figure: matplotlib is not installed" in text
    assert not (tmp_path / "curves.png").exists()


@pytest.mark.parametrize("lines", [[], LINES[:1]])
def test_a_report_of_a_run_without_steps(tmp_path: Path, lines: list[object]) -> None:
    assert "<h1>made</h1>" in write(run(tmp_path, lines), "OSError").read_text()
