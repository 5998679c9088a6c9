"""A run as one HTML page, `report.html`, next to `curves.png` and `curves.svg`.

The page is self-contained: its Content-Security-Policy forbids scripts and everything that is not
in the file. Values of the run are escaped.
"""

from __future__ import annotations

import base64
import shlex
from datetime import UTC, datetime
from pathlib import Path

from ingot.core import log
from ingot.core.paths import write_atomic
from ingot.observe import plot
from ingot.observe.history import RECIPE, RunHistory

NAME = "report.html"
CURVES = "curves"
_MAX_ROWS = 50  # of a table

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ name }}: {{ ended }}</title>
<style>
:root { color-scheme: light dark; --ink: #1f2937; --grey: #6b7280; --line: #e5e7eb;
  --paper: #ffffff; --tile: #f6f7f9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e5e7eb; --grey: #9ca3af; --line: #374151;
  --paper: #111827; --tile: #1f2937; } }
body { margin: 0 auto; max-width: 68rem; padding: 2rem 1.5rem 4rem; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; overflow-wrap: anywhere; }
h2 { margin: 2.4rem 0 .6rem; font-size: 1.1rem; }
p { margin: .3rem 0; color: var(--grey); overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: .7rem;
  margin: 1.4rem 0; }
.tile { padding: .7rem .9rem; border-radius: .5rem; background: var(--tile); }
.tile b { display: block; font-size: 1.25rem; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.tile span { color: var(--grey); font-size: .85rem; }
img { width: 100%; border: 1px solid var(--line); border-radius: .5rem; background: #fff; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem 1.2rem .25rem 0; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--grey); font-weight: 500; }
pre { padding: .9rem 1.1rem; border-radius: .5rem; background: var(--tile); overflow-x: auto;
  font: 13px/1.45 ui-monospace, monospace; }
</style>
</head>
<body>
<h1>{{ name }}</h1>
<p>{{ ended }}, {{ when }}</p>
<p>{{ directory }}</p>
<div class="tiles">
{%- for label, value in tiles %}
<div class="tile"><b>{{ value }}</b><span>{{ label }}</span></div>
{%- endfor %}
</div>
{%- if image %}
<img alt="loss, gradient norm, learning rate and throughput by step" src="{{ image }}">
{%- else %}
<p>No curves: matplotlib is not installed (pip install 'ingot[train]')</p>
{%- endif %}
{%- if commands %}
<h2>Next</h2>
<pre>{{ commands }}</pre>
{%- endif %}
{%- if evaluations %}
<h2>Validation</h2>
<table>
<tr>{% for heading in headings %}<th>{{ heading }}</th>{% endfor %}</tr>
{%- for row in evaluations %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</table>
{%- endif %}
{%- if skipped %}
<h2>Skipped steps</h2>
<table>
<tr><th>step</th><th>reason</th></tr>
{%- for step, reason in skipped %}
<tr><td>{{ step }}</td><td>{{ reason }}</td></tr>
{%- endfor %}
</table>
{%- endif %}
<h2>Recipe</h2>
<pre>{{ recipe }}</pre>
<h2>Environment</h2>
<table>
{%- for key, value in environment.items() %}
<tr><th>{{ key }}</th><td>{{ value }}</td></tr>
{%- endfor %}
</table>
</body>
</html>
"""


def write(directory: Path, ended: str) -> Path:
    """Plot the curves of a run and write its report; `ended` says how the run ended."""
    run = RunHistory.read(directory)
    image = None
    if plot.available():
        files = [directory / f"{CURVES}{suffix}" for suffix in plot.SUFFIXES]
        plot.draw(run, files)
        code = base64.b64encode(files[-1].read_bytes()).decode()
        image = f"data:image/svg+xml;base64,{code}"
    else:
        log.logger(__name__).info(
            "the report has no curves: matplotlib is not installed (pip install 'ingot[train]')"
        )
    path = directory / NAME
    write_atomic(path, render(run, ended, image))
    return path


def render(run: RunHistory, ended: str, image: str | None) -> str:
    """Render the report as HTML; `image` is the URL of the curves."""
    from jinja2 import Environment

    template = Environment(autoescape=True).from_string(_PAGE)
    return template.render(
        name=run.name,
        ended=ended,
        when=datetime.fromtimestamp(run.updated, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        directory=str(run.directory.resolve()),
        tiles=_tiles(run),
        image=image,
        commands=_commands(run),
        headings=("step", *_columns(run)),
        evaluations=_evaluations(run),
        skipped=run.skipped_steps()[-_MAX_ROWS:],
        recipe=(run.directory / RECIPE).read_text(),
        environment=run.environment,
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
