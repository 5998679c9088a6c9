"""One HTML page as a report: of a training run, of a quantized model.

The page is self-contained: its Content-Security-Policy forbids scripts and everything that is not
in the file. Values are escaped.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ingot.core import log
from ingot.observe import plot

NAME = "report.html"

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}: {{ status }}</title>
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
.numbers td + td, .numbers th + th { text-align: right; }
pre { padding: .9rem 1.1rem; border-radius: .5rem; background: var(--tile); overflow-x: auto;
  font: 13px/1.45 ui-monospace, monospace; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p>{{ status }}, {{ date }}</p>
<p>{{ path }}</p>
{%- if tiles %}
<div class="tiles">
{%- for label, value in tiles %}
<div class="tile"><b>{{ value }}</b><span>{{ label }}</span></div>
{%- endfor %}
</div>
{%- endif %}
{%- for section in sections %}
{%- if section.heading %}
<h2>{{ section.heading }}</h2>
{%- endif %}
{%- if section.image %}
<img alt="{{ section.alt }}" src="{{ section.image }}">
{%- endif %}
{%- if section.text %}
<pre>{{ section.text }}</pre>
{%- endif %}
{%- if section.rows %}
<table{% if section.numbers %} class="numbers"{% endif %}>
{%- if section.headings %}
<tr>{% for heading in section.headings %}<th>{{ heading }}</th>{% endfor %}</tr>
{%- endif %}
{%- for row in section.rows %}
<tr>
{%- for cell in row %}
{%- set tag = "th" if loop.first and not section.headings else "td" %}
<{{ tag }}>{{ cell }}</{{ tag }}>
{%- endfor %}
</tr>
{%- endfor %}
</table>
{%- endif %}
{%- if section.note %}
<p>{{ section.note }}</p>
{%- endif %}
{%- endfor %}
</body>
</html>
"""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page, left out if it has no content."""

    heading: str = ""
    image: str | None = None
    """URL of an image."""
    alt: str = ""
    """What the image shows, for readers who do not see it."""
    text: str = ""
    """Shown as it is, in a monospaced font."""
    headings: Sequence[str] = ()
    """Of the columns of a table."""
    rows: Sequence[Sequence[str]] = ()
    numbers: bool = False
    """Whether all columns but the first are numbers, which are aligned to the right."""
    note: str = ""

    @property
    def has_content(self) -> bool:
        """Whether there is more than a heading."""
        return bool(self.image or self.text or self.rows or self.note)


def render(
    title: str,
    status: str,
    sections: Sequence[Section],
    *,
    path: Path,
    seconds: float,
    tiles: Sequence[tuple[str, str]] = (),
) -> str:
    """Render a page as HTML.

    Args:
        title: Its heading.
        status: What it is about in a few words, such as how a run ended.
        sections: Its parts.
        path: The directory that it describes.
        seconds: Time of what it describes, in seconds since 1970.
        tiles: Names and values of the most important numbers.
    """
    from jinja2 import Environment

    return (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            title=title,
            status=status,
            sections=[section for section in sections if section.has_content],
            path=str(path.resolve()),
            date=datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC"),
            tiles=tiles,
        )
    )


def figure(
    directory: Path, name: str, draw: Callable[[list[Path]], object], alt: str, heading: str = ""
) -> Section:
    """Draw a figure to `name.png` and `name.svg` and return it as a section.

    `draw` is called with the paths. Without matplotlib, the section says that it is missing.
    """
    if not plot.available():
        missing = "matplotlib is not installed (pip install 'ingot[plot]')"
        log.logger(__name__).info("the report has no figure: %s", missing)
        return Section(heading=heading, note=f"No figure: {missing}")
    files = [directory / f"{name}{suffix}" for suffix in plot.SUFFIXES]
    draw(files)
    code = base64.b64encode(files[-1].read_bytes()).decode()
    return Section(heading=heading, image=f"data:image/svg+xml;base64,{code}", alt=alt)
