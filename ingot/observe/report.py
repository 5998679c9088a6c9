"""A run as one HTML page, `report.html`, next to `curves.png` and `curves.svg`."""

from __future__ import annotations

import shlex
from pathlib import Path

from ingot.core.paths import write_atomic
from ingot.observe import page, plot
from ingot.observe.history import RECIPE, RunHistory

CURVES = "curves"
_MAX_ROWS = 50  # of a table


def write(directory: Path, ended: str) -> Path:
    """Plot the curves of a run and write its report; `ended` says how the run ended."""
    run = RunHistory.read(directory)
    alt = "loss, gradient norm, learning rate and throughput by step"
    curves = page.figure(directory, CURVES, lambda files: plot.draw(run, files), alt)
    path = directory / page.NAME
    write_atomic(path, render(run, ended, curves))
    return path


def render(run: RunHistory, ended: str, curves: page.Section) -> str:
    """Render the report as HTML."""
    sections = [
        curves,
        page.Section(heading="Next", text=_commands(run)),
        page.Section(
            heading="Validation",
            headings=("step", *_columns(run)),
            rows=_evaluations(run),
            numbers=True,
        ),
        page.Section(
            heading="Skipped steps",
            headings=("step", "reason"),
            rows=[(str(step), reason) for step, reason in run.skipped_steps()[-_MAX_ROWS:]],
        ),
        page.Section(heading="Recipe", text=(run.directory / RECIPE).read_text()),
        page.Section(
            heading="Environment", rows=[(key, str(v)) for key, v in run.environment.items()]
        ),
    ]
    return page.render(
        run.name,
        ended,
        sections,
        path=run.directory,
        seconds=run.updated,
        tiles=_tiles(run),
    )


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(7.26), duration(312), duration(8000)
    ('7.3 s', '5 min 12 s', '2 h 13 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _tiles(run: RunHistory) -> list[tuple[str, str]]:
    summary = run.summary()

    def show(name: str, form: str) -> str | None:
        return None if summary[name] is None else format(summary[name], form)

    tiles = [
        ("loss, last steps", show("loss", ".4g")),
        ("validation loss", show("validation_loss", ".4g")),
        ("best validation loss", show("best_validation_loss", ".4g")),
        ("validation accuracy", show("accuracy", ".2%")),
        ("steps", f"{run.step:,} / {run.steps:,}"),
        ("time of all steps", duration(summary["seconds"])),
        (f"{run.unit}/s", show("rows_per_s", ",.0f")),
        ("time waiting for data", show("data_wait_fraction", ".1%")),
        ("skipped steps", f"{summary['skipped']:,}" if summary["skipped"] else None),
    ]
    return [(label, value) for label, value in tiles if value is not None]


def _columns(run: RunHistory) -> dict[str, str]:
    """Return the names of the metrics of evaluations, by heading."""
    columns = {"loss": "validation_loss"}
    if len(run.curve("accuracy")):
        columns["accuracy"] = "accuracy"
    return columns | {name: f"validation_{name}" for name in run.objective_metrics()}


def _evaluations(run: RunHistory) -> list[tuple[str, ...]]:
    values: list[dict[int, float]] = []
    for name in _columns(run).values():
        curve = run.curve(name)
        values.append(dict(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)))
    forms = [".2%" if "accura" in heading else ".5g" for heading in _columns(run)]
    return [
        (
            f"{step:,}",
            *(format(v[step], f) if step in v else "" for v, f in zip(values, forms, strict=True)),
        )
        for step in list(values[0])[-_MAX_ROWS:]
    ]


def _commands(run: RunHistory) -> str:
    place = shlex.quote(str(run.directory.resolve()))
    lines: list[str] = []
    if run.step < run.steps:
        lines.append(f"ingot train {place}/{RECIPE} --run {place} --resume")
    if (run.directory / "model").is_dir():
        lines.append(f"ingot generate {place}/model 'Once upon a time'")
        lines.append(f"ingot serve {place}/model")
    return "\n".join(lines)
