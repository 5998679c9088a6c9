"""`ingot runs`: what was trained, and how runs compare."""

from __future__ import annotations

import json as json_format
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ingot.cli import escape_markup
from ingot.core import log, paths
from ingot.core.errors import IngotError

if TYPE_CHECKING:
    from rich.table import Table

    from ingot.observe.history import History

_COMPARED = 8


def runs(
    directories: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[DIR ...]")
    ] = (),
    plot: Path | None = None,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """List runs with their results, the newest last; of some that are named (up to eight) also what
    their recipes differ in.

    Examples: `ingot runs` for all, `ingot runs RUN RUN --plot losses.png` for two of them beside
    each other, `ingot runs --json` for machines.

    Args:
        directories: Runs, or directories of runs; where `ingot train` puts them if left out.
        plot: Draw their losses into this file, .png or .svg.
        json: Print JSON instead of a table.
    """
    from ingot.observe import plot as plots
    from ingot.observe.history import History, find

    if plot:
        plots.check(plot)
    for directory in directories:
        if not directory.is_dir():
            raise IngotError(
                f"there is no directory {directory}", hint="`ingot runs` lists what there is"
            )
    places = directories or (paths.runs(),)
    found = [History.read(path) for path in find(places)]
    if plot and found:
        plots.compare(found, plot)
    if json:
        print(json_format.dumps([_described(run) for run in found], indent=2))  # noqa: T201
    elif found:
        log.stdout().print(_table(found))
        if directories and 1 < len(found) <= _COMPARED:
            _print_differences(found)
    else:
        where = ", ".join(escape_markup(str(place)) for place in places)
        log.stdout().print(
            f"no runs in {where}; `ingot train` makes one", highlight=False, soft_wrap=True
        )


def _described(run: History) -> dict[str, Any]:
    shared = {"run": str(run.directory), "name": run.name, "unit": run.unit}
    return {**shared, **run.figures(), "updated": run.updated, "recipe": run.recipe}


def _print_differences(found: list[History]) -> None:
    from ingot.observe.history import differences

    table = _new_table("differ in", *(str(number) for number in range(1, len(found) + 1)))
    for key, values in differences(found).items():
        cells = ["-" if value is None else escape_markup(str(value)[:40]) for value in values]
        table.add_row(escape_markup(key), *cells)
    if table.row_count:
        log.stdout().print("", table)


def _new_table(*headings: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading)
    return table


def _table(found: list[History]) -> Table:
    from ingot.observe.report import duration

    table = _new_table("", "run")
    for heading in ("steps", "loss", "held out", "accuracy", "rate", "time", "written"):
        table.add_column(heading, justify="right", no_wrap=True)
    for number, run in enumerate(found, 1):
        figures, ago = run.figures(), max(0.0, time.time() - run.updated)
        rate = figures["rows_per_s"]
        table.add_row(
            str(number),
            escape_markup(run.directory.name),
            f"{run.step:,}/{run.steps:,}",
            _shown(figures["loss"], ".4g"),
            _shown(figures["validation_loss"], ".4g"),
            _shown(figures["accuracy"], ".2%"),
            "-" if rate is None else f"{rate:,.0f} {run.unit}/s",
            duration(figures["seconds"]),
            f"{duration(ago)} ago",
        )
    return table


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
