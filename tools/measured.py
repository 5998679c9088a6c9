"""Writes the measured speeds of the ops into their docs page while the site is built.

A hook of mkdocs: the tables are made from `benchmarks/results/ops.csv` at every build, so they say
what the last `ingot bench ops --results benchmarks/results` has measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ingot.bench.ops import Row
from ingot.bench.results import Record, latest, means, read, served

RESULTS = Path(__file__).parent.parent / "benchmarks/results/ops.csv"
PLACE = "<!-- measured -->"
_MEANS = ("family", "shapes", "share of limit", "vs aten", "vs compile")
_LINES = (
    *("op", "shape", "dtype", "provider", "p50, us", "limit", "share of limit"),
    *("vs aten", "vs compile", "exact"),
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the tables where the page asks for them."""
    if page.file.src_uri != "bench.md":
        return markdown
    records = latest(read(RESULTS)) if RESULTS.exists() else []
    return markdown.replace(PLACE, render(records))


def render(records: list[Record]) -> str:
    """Where it was measured, the means of the families, and a line for each workload."""
    if not records:
        return "No run is kept yet."
    run = records[-1].run
    rows = [record.row for record in records]
    days = sorted({record.run.date[:10] for record in records})
    versions = " and ".join(sorted({record.run.ingot for record in records}))
    return "\n\n".join(
        (
            f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))} on {run.cpu} "
            f"({run.isa}), torch {run.torch}, ingot {versions}. Geometric means, then every shape:",
            _table(_MEANS, _mean_lines(rows)),
            _table(_LINES, map(_line, sorted(served(rows), key=lambda row: (row.family, row.op)))),
        )
    )


def _mean_lines(rows: list[Row]) -> Iterable[tuple[str, ...]]:
    for mean in means(rows):
        share = _percent(mean.share_of_limit)
        speedups = _times(mean.vs_aten), _times(mean.vs_compile)
        yield f"**{mean.family}**", str(mean.workloads), share, *speedups


def _line(row: Row) -> tuple[str, ...]:
    return (
        *(row.op, row.shape, row.dtype, row.provider, f"{row.p50_us:,g}"),
        *(row.limit, _percent(row.share_of_limit), _times(row.vs_aten), _times(row.vs_compile)),
        "yes" if row.exact else "no",
    )


def _table(headings: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    rows = (headings, ("---",) * len(headings), *lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
