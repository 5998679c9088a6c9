"""`ingot runs`: list and compare training runs."""

from __future__ import annotations

import json as json_format
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ingot.cli import escape_markup
from ingot.cli.tables import new_table
from ingot.core import log, paths
from ingot.core.errors import IngotError

if TYPE_CHECKING:
    from rich.table import Table

    from ingot.forecast.forecaster import Forecast
    from ingot.observe.history import RunHistory

_MAX_COMPARED = 8
_MAX_FORECAST = 50  # of the runs that are not finished


def runs(
    directories: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[DIR ...]")
    ] = (),
    plot: Path | None = None,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """List training runs with their results, the newest last, and forecasts of those that are not
    finished; for two to eight given runs, also the differences of their recipes.

    Examples: `ingot runs` for all, `ingot runs RUN RUN --plot losses.png` to compare two,
    `ingot runs --json` for scripts.

    Args:
        directories: Runs, or directories of runs; by default those of `ingot train`.
        plot: Draw the losses into this file, .png or .svg.
        json: Print JSON instead of a table.
    """
    from ingot.observe import plot as plots
    from ingot.observe.history import RunHistory, find_runs

    if plot:
        plots.check(plot)
    for directory in directories:
        if not directory.is_dir():
            raise IngotError(
                f"{directory}: no such directory", hint="list the runs with `ingot runs`"
            )
    places = directories or (paths.runs(),)
    histories = [RunHistory.read(path) for path in find_runs(places)]
    forecasts = _forecast(histories)
    if plot and histories:
        plots.compare(histories, plot)
    if json:
        rows = [_describe(run, forecasts.get(run.directory)) for run in histories]
        print(json_format.dumps(rows, indent=2))  # noqa: T201
    elif histories:
        log.stdout().print(_table(histories, forecasts))
        if directories and 1 < len(histories) <= _MAX_COMPARED:
            _print_differences(histories)
    else:
        where = ", ".join(escape_markup(str(place)) for place in places)
        log.stdout().print(
            f"no runs in {where}; `ingot train` starts one", highlight=False, soft_wrap=True
        )


def _forecast(histories: list[RunHistory]) -> dict[Path, Forecast]:
    """Forecast the runs that are not finished, if they have enough steps for it."""
    running = [run for run in histories if 0 < run.step < run.steps]
    if not running:
        return {}
    from ingot.workflows import forecast as workflow

    found: dict[Path, Forecast] = {}
    forecaster = workflow.load_forecaster()
    for run in running[-_MAX_FORECAST:]:
        with suppress(IngotError):  # too short, or not finite
            current = workflow.forecast(run.directory, forecaster=forecaster).forecast
            if current is not None and current.refusal is None:
                found[run.directory] = current
    return found


def _describe(run: RunHistory, forecast: Forecast | None) -> dict[str, Any]:
    shared = {"run": str(run.directory), "name": run.name, "unit": run.unit}
    end = None if forecast is None else dict(zip(("end", "low", "high"), forecast.end, strict=True))
    updated = {"updated": run.updated, "recipe": run.recipe}
    return {**shared, **run.summary(), "forecast": end, **updated}


def _print_differences(histories: list[RunHistory]) -> None:
    from ingot.observe.history import differences

    table = _new_table(("difference", *(str(number) for number in range(1, len(histories) + 1))))
    for key, values in differences(histories).items():
        cells = ["-" if value is None else escape_markup(str(value)[:40]) for value in values]
        table.add_row(escape_markup(key), *cells)
    if table.row_count:
        log.stdout().print("", table)


def _new_table(left: Iterable[str], right: Iterable[str] = ()) -> Table:
    return new_table(left, right, wrap=True, show_edge=False, padding=(0, 2, 0, 0))


def _table(histories: list[RunHistory], forecasts: dict[Path, Forecast]) -> Table:
    from ingot.observe.report import duration

    forecast = ("forecast",) if forecasts else ()
    columns = ("steps", "loss", "validation", *forecast, "accuracy", "rate", "time", "updated")
    table = _new_table(("", "run"), columns)
    for number, run in enumerate(histories, 1):
        figures, ago = run.summary(), max(0.0, time.time() - run.updated)
        rate = figures["rows_per_s"]
        table.add_row(
            str(number),
            escape_markup(run.directory.name),
            f"{run.step:,}/{run.steps:,}",
            _format(figures["loss"], ".4g"),
            _format(figures["validation_loss"], ".4g"),
            *([_interval(forecasts.get(run.directory))] if forecasts else []),
            _format(figures["accuracy"], ".2%"),
            "-" if rate is None else f"{rate:,.0f} {run.unit}/s",
            duration(figures["seconds"]),
            f"{duration(ago)} ago",
        )
    return table


def _interval(forecast: Forecast | None) -> str:
    if forecast is None:
        return "-"
    value, low, high = forecast.end
    return f"{value:.4g} ({low:.4g} to {high:.4g})"


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
