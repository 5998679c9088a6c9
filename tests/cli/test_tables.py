from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from ingot.cli.tables import new_grid, new_table


def show(table: Table, width: int) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(table)
    return output.getvalue()


def test_columns_are_aligned_left_and_right() -> None:
    table = new_table(("name",), ("speed",))
    table.add_row("a", "7")
    lines = [line for line in show(table, 40).splitlines() if line.strip()]
    assert lines[0].split() == ["name", "speed"]
    assert lines[-1].index("a") == lines[0].index("name")
    assert lines[-1].rstrip().index("7") == lines[0].index("speed") + len("speed") - 1


def test_cells_are_wrapped_only_if_asked() -> None:
    for wrap in (True, False):
        table = new_table(("name",), wrap=wrap)
        table.add_row("two words")
        assert ("words" in show(table, 8)) == wrap


def test_grid_has_a_line_per_name() -> None:
    assert show(new_grid([("one", "1"), ("three", "3")]), 40).split() == ["one", "1", "three", "3"]
