"""The README's table matches the kept benchmark results."""

from __future__ import annotations

from pathlib import Path

from tools import figures


def test_the_readme_matches_the_results() -> None:
    text = figures.README.read_text()
    assert figures.BEGIN in text
    assert text == figures.updated(text), "run `python -m tools.figures`"


def test_a_stale_readme_is_noticed() -> None:
    text = figures.README.read_text().replace("| batch 1 |", "| batch 2 |")
    assert text != figures.updated(text)


def test_the_plot_has_a_panel_for_each_comparison(tmp_path: Path) -> None:
    results = figures.generation()
    figures.draw(results, tmp_path / "generation.svg")
    image = (tmp_path / "generation.svg").read_text()
    panels = sum(len(batches) for batches in results.values())
    assert panels >= 3
    assert image.count('<g id="axes_') == panels
