from __future__ import annotations

import base64
from pathlib import Path

import pytest

from ingot.observe import plot
from ingot.observe.page import Section, figure, render
from tests.observe.parsed_html import ParsedHtml

ATTACK = "</pre><script>alert(1)</script>"


def page(*sections: Section, **options: object) -> str:
    return render("title", "status", sections, path=Path("/models/a"), seconds=0.0, **options)  # type: ignore


def test_a_page_has_its_sections_in_order() -> None:
    table = Section(heading="Table", headings=("a", "b"), rows=[("x", "1"), ("y", "2")])
    text = page(Section(heading="Text", text="as it is", note="a note"), table)
    found = ParsedHtml(text).text.split()
    expected = "title status, 1970-01-01 00:00 UTC /models/a Text as it is a note Table ab x 1 y 2"
    assert " ".join(found).endswith(expected)


def test_sections_without_content_and_tiles_are_left_out() -> None:
    empty = ParsedHtml(page(Section(heading="Empty")))
    assert "Empty" not in empty.text
    assert "div" not in {tag for tag, _ in empty.tags}
    assert "12steps" in ParsedHtml(page(tiles=[("steps", "12")])).text


def test_everything_is_escaped() -> None:
    section = Section(heading=ATTACK, alt=ATTACK, image=ATTACK, text=ATTACK, note=ATTACK)
    table = Section(headings=(ATTACK,), rows=[(ATTACK,)])
    found = ParsedHtml(page(section, table, tiles=[(ATTACK, ATTACK)]))
    assert "script" not in {tag for tag, _ in found.tags}
    assert found.text.count(ATTACK) == 7


def test_a_figure_is_written_and_embedded(tmp_path: Path) -> None:
    def draw(files: list[Path]) -> None:
        for file in files:
            file.write_text(f"<{file.suffix}>")

    section = figure(tmp_path, "name", draw, "what it shows")
    assert section.image is not None
    assert base64.b64decode(section.image.partition(",")[2]) == b"<.svg>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["name.png", "name.svg"]


def test_without_matplotlib_the_page_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "available", lambda: False)
    section = figure(tmp_path, "name", lambda files: pytest.fail("was drawn"), "what it shows")
    assert "ingot[plot]" in page(section)
    assert not list(tmp_path.iterdir())
