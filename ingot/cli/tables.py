"""Tables and numbers for the terminal, in one style for all commands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table


def new_table(
    left: Iterable[str], right: Iterable[str] = (), *, wrap: bool = False, **options: Any
) -> Table:
    """Return a table with left-aligned columns and then right-aligned ones.

    `wrap` allows line breaks in left-aligned cells; `options` are those of rich.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, **options)
    for heading in left:
        table.add_column(heading, no_wrap=not wrap)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def new_grid(rows: Iterable[tuple[str, str]]) -> Table:
    """Return lines of a name in bold and a value; the values may have markup."""
    from rich.table import Table

    table = Table.grid(padding=(0, 3))
    table.add_column(style="bold", no_wrap=True)
    for name, value in rows:
        table.add_row(name, value)
    return table


def digits(value: float) -> str:
    """Format with three significant digits and without an exponent.

    >>> digits(3.14159), digits(41.27), digits(271828.0)
    ('3.14', '41.3', '271828')
    """
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}"


def speedup(ratio: float | None) -> str:
    """Format a ratio of speeds.

    >>> speedup(1.234), speedup(None)
    ('1.23x', '-')
    """
    return "-" if ratio is None else f"{digits(ratio)}x"


def percent(fraction: float | None) -> str:
    """Format a fraction.

    >>> percent(0.8049), percent(None)
    ('80%', '-')
    """
    return "-" if fraction is None else f"{fraction:.0%}"
