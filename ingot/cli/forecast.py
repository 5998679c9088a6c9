"""`ingot forecast`: forecast the loss of a training run."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ingot.cli import escape_markup
from ingot.cli.tables import new_grid, new_table, percent
from ingot.core import log, paths
from ingot.core.errors import IngotError

if TYPE_CHECKING:
    from ingot.forecast.forecaster import Forecast
    from ingot.workflows.forecast import RunForecast


def forecast(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    target: float | None = None,
    steps: int | None = None,
    decay_now: int | None = None,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Forecast the final loss of a run, with an 80 % band, from its metrics so far.

    Shows which experts are trusted, and what the run's earlier forecasts were. The run may still be
    training; it is only read.

    Examples: `ingot forecast stdlib-10m`, `ingot forecast RUN --target 2.2` for when a loss is
    reached, `ingot forecast RUN --steps 5000` for a longer run, `ingot forecast RUN --decay-now
    200` for a learning rate that falls to 0 within 200 steps from now.

    Args:
        run: The directory of a run, or the name of a recipe for its newest run.
        target: Show when this loss is reached.
        steps: Forecast the run as if it was resumed with this number of steps.
        decay_now: Forecast it as if the learning rate fell linearly to 0 within N steps from now.
        json: Print JSON.
    """
    from ingot.workflows import forecast as workflow

    if target is not None and not target > 0:
        raise IngotError(f"target: must be above 0, got {target}", hint="give a loss")
    found = workflow.forecast(_find(run), steps=steps, decay_now=decay_now)
    if json:
        print(json_format.dumps(_describe(found, target), indent=2))  # noqa: T201
    else:
        _print(found, target)


def _find(run: str) -> Path:
    if (Path(run) / "recipe.toml").is_file():
        return Path(run)
    if named := paths.find_runs(run):
        return named[-1]
    raise IngotError(
        f"{run}: not the directory of a run, nor the name of one in {paths.runs()}",
        hint="list the runs with `ingot runs`",
    )


def _describe(found: RunForecast, target: float | None) -> dict[str, Any]:
    from ingot.workflows.forecast import record

    row: dict[str, Any] = {"run": str(found.run.directory), "step": found.step}
    row |= {"steps": found.steps, "target": found.target, "loss": found.loss}
    row["forecast"] = None if found.forecast is None else record(found.forecast)
    row["past"] = [{"percent": p.percent, **record(p.forecast)} for p in found.past]
    row["truth"] = found.truth
    if target is not None and found.forecast is not None:
        arrival = found.forecast.arrival(target)
        row["arrival"] = {"loss": target, **vars(arrival)}
    return row


def _print(found: RunForecast, target: float | None) -> None:
    from ingot.workflows.forecast import describe_arrival

    out, current = log.stdout(), found.forecast
    kind = found.target.replace("_", " ")
    rows = [
        ("run", escape_markup(str(found.run.directory))),
        (kind, f"{found.loss:.4g} at step {found.step:,} of {found.steps:,}"),
    ]
    if current is None:
        rows.append(("forecast", "none: the run is finished"))
    else:
        rows.append(("at the end", _interval(current)))
        if target is not None and current.refusal is None:
            rows.append(("target", describe_arrival(current, target, found.seconds_per_step)))
        of_task = (
            f"{current.same_task:,} of this task" if current.same_task else "none of this task"
        )
        rows.append(("earlier runs", f"{current.earlier_runs:,}, {of_task}"))
    out.print(new_grid(rows), highlight=False)
    if current is not None:
        out.print("", _experts(current))
    if found.past:
        out.print("", _past(found))


def _interval(found: Forecast) -> str:
    value, low, high = found.end
    text = f"{value:.4g}, 80 % band {low:.4g} to {high:.4g}"
    return text if found.refusal is None else f"no forecast: {escape_markup(found.refusal)}"


def _experts(found: Forecast) -> Any:
    table = new_table(("expert",), ("weight", "at the end", "error in backtests"), show_edge=False)
    for name in sorted(found.weights, key=lambda name: -found.weights[name]):
        weight, error = percent(found.weights[name]), f"{found.backtests[name]:.1%}"
        table.add_row(name, weight, f"{found.ends[name]:.4g}", error)
    return table


def _past(found: RunForecast) -> Any:
    came = "what came" if found.truth is not None else "so far"
    table = new_table(
        ("forecast at",), ("step", "end", "80 % band", came, "off by"), show_edge=False
    )
    for past in found.past:
        value, low, high = past.forecast.end
        truth = found.loss if found.truth is None else found.truth
        missed = "" if found.truth is None else f"{value / truth - 1:+.1%}"
        band = f"{low:.4g} to {high:.4g}" if past.forecast.refusal is None else "no forecast"
        cells = (f"{past.forecast.step:,}", f"{value:.4g}", band, f"{truth:.4g}", missed)
        table.add_row(f"{past.percent} %", *cells)
    return table
