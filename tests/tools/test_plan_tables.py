from __future__ import annotations

import re

import pytest

from tools import plan_tables

PAGE = plan_tables.PAGE.read_text()


def test_every_table_has_its_place_on_the_page() -> None:
    places = re.findall(r"<!-- plan ([\w ]+) -->\n\|", PAGE)
    assert sorted(places) == sorted(plan_tables.TABLES)


def test_a_table_is_replaced_and_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan_tables.TABLES, "memory", lambda: "new")
    text = "a\n<!-- plan memory -->\nold\n<!-- /plan memory -->\nb"
    filled = plan_tables.fill(text, ["memory"])
    assert filled == text.replace("old", "new")
    assert plan_tables.fill(filled, ["memory"]) == filled


def test_the_first_rows_are_the_targets() -> None:
    rows = [line.split(" | ") for line in plan_tables.error_table().splitlines()[2:4]]
    assert [row[0] for row in rows] == ["| **dense**", "| **mixture of experts**"]
    dense = [tuple(map(float, cell.strip(" |").split(" / "))) for cell in rows[0][3:5]]
    assert dense[0] <= (8.0, 18.0)
    assert dense[1] <= (5.0, 15.0)
