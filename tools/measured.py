"""Writes the measured speeds into docs/bench.md while the site is built.

A hook of mkdocs: the tables are built from `benchmarks/results`, so they always show the last
`ingot bench ops`, `compare` and `train` with `--results benchmarks/results`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ingot.bench.ops import OpRow
from ingot.bench.results import Record, called_rows, family_means, latest, read
from ingot.bench.train import describe_options

_Line = dict[str, str]

RESULTS = Path(__file__).parent.parent / "benchmarks/results"
PLACE, COMPARE_PLACE = "<!-- measured -->", "<!-- measured compare -->"
TRAIN_PLACE = "<!-- measured train -->"
_MEANS = ("family", "shapes", "% of roofline", "vs eager", "vs compile")
_LINES = (
    *("op", "shape", "dtype", "provider", "p50, us", "bound", "% of roofline"),
    *("vs eager", "vs compile", "batch-invariant"),
)
_COMPARE = (
    *("system", "version", "dtype", "tokens/s", "% of roofline", "speedup"),
    *("TTFT", "load time", "memory", "peak memory"),
)
_TRAIN = (
    *("system", "tokens/s", "% of roofline", "speedup", "forward, backward, optimizer in ms"),
    "GB at peak, of the step, of activations",
)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the markers of the page by the tables."""
    if page.file.src_uri != "bench.md":
        return markdown
    ops = RESULTS / "ops.csv"
    markdown = markdown.replace(PLACE, render(latest(read(ops)) if ops.exists() else []))
    markdown = markdown.replace(COMPARE_PLACE, render_compare(RESULTS / "compare.csv"))
    return markdown.replace(TRAIN_PLACE, render_train(RESULTS / "train.csv"))


def render(records: list[Record]) -> str:
    """Return the machine, the means of the families, and a line for each workload."""
    if not records:
        return "No results yet."
    run = records[-1].run
    rows = [record.row for record in records]
    days = sorted({record.run.date[:10] for record in records})
    versions = " and ".join(sorted({record.run.ingot for record in records}))
    return "\n\n".join(
        (
            f"Measured {' to '.join(dict.fromkeys((days[0], days[-1])))} on {run.cpu} "
            f"({run.isa}), torch {run.torch}, ingot {versions}. Geometric "
            "means, then every shape:",
            _table(_MEANS, _mean_lines(rows)),
            _table(
                _LINES, map(_line, sorted(called_rows(rows), key=lambda row: (row.family, row.op)))
            ),
        )
    )


def render_compare(path: Path) -> str:
    """Return the systems of the last run, for each instruction set, model and task."""
    return _runs(path, ("isa", "model", "batch_size", "input_len", "output_len"), _render_task)


def render_train(path: Path) -> str:
    """Return the systems of the last run, for each instruction set, model and batch size."""
    return _runs(path, ("isa", "model", "batch_size", "seq_len"), _render_steps)


def _runs(path: Path, task: tuple[str, ...], render: Callable[[list[_Line]], str]) -> str:
    if not path.exists():
        return "No results yet."
    last: dict[tuple[str, ...], list[_Line]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            rows = last.setdefault(tuple(row[field] for field in task), [])
            if rows and rows[0]["date"] != row["date"]:
                rows.clear()
            rows.append(row)
    return "\n\n".join(map(render, last.values()))


def _render_task(rows: list[_Line]) -> str:
    one = rows[0]
    return (
        f"Measured {one['date'][:10]} on {one['cpu']} ({one['isa']}), ingot {one['ingot']}: "
        f"{one['model']}, {one['batch_size']} x {one['input_len']} tokens in, "
        f"{one['batch_size']} x {one['output_len']} out, {one['rounds']} rounds, read bandwidth "
        f"{one['read_gbs']} GB/s.\n\n" + _table(_COMPARE, map(_compare_line, rows))
    )


def _compare_line(row: _Line) -> tuple[str, ...]:
    if row["error"]:
        return (row["system"], f"error: {row['error']}", *("-" for _ in _COMPARE[2:]))
    return (
        *(row["system"], row["version"], row["dtype"]),
        f"{row['tokens_per_s']} ({row['p20']} to {row['p80']})",
        *(_percent(float(row["roofline_fraction"])), _times(float(row["speedup"]))),
        *(f"{row['ttft_ms']} ms", f"{row['load_s']} s", f"{row['memory_mb']} MB"),
        f"{row['peak_memory_mb']} MB" if row["peak_memory_mb"] else "-",
    )


def _render_steps(rows: list[_Line]) -> str:
    one = rows[0]
    return (
        f"Measured {one['date'][:10]} on {one['cpu']} ({one['isa']}), torch {one['torch']}, ingot "
        f"{one['ingot']}: {one['model']}, {one['batch_size']} x {one['seq_len']} tokens per step, "
        f"{one['rounds']} rounds.\n\n" + _table(_TRAIN, map(_step_line, rows))
    )


def _step_line(row: _Line) -> tuple[str, ...]:
    if row["error"]:
        return (row["system"], f"error: {row['error']}", *("-" for _ in _TRAIN[2:]))
    others = describe_options(row["recompute"], row["state_dtype"])
    parts, memory = ("forward", "backward", "optimizer"), ("peak", "step", "activation")
    return (
        f"{row['system']} {row['version']}, {row['precision']}" + (others and f", {others}"),
        f"{row['tokens_per_s']} ({row['p20']} to {row['p80']})",
        _percent(float(row["roofline_fraction"])) if row["roofline_fraction"] else "-",
        _times(float(row["speedup"])) if row["speedup"] else "-",
        ", ".join(f"{1e3 * float(row[f'{part}_s']):.0f}" for part in parts),
        ", ".join(f"{int(row[f'{part}_memory_bytes']) / 1e9:.2f}" for part in memory),
    )


def _mean_lines(rows: list[OpRow]) -> Iterable[tuple[str, ...]]:
    for mean in family_means(rows):
        share = _percent(mean.roofline_fraction)
        speedups = _times(mean.vs_eager), _times(mean.vs_compile)
        yield f"**{mean.family}**", str(mean.workloads), share, *speedups


def _line(row: OpRow) -> tuple[str, ...]:
    return (
        *(row.op, row.shape, row.dtype, row.provider, f"{row.p50_us:,g}"),
        *(row.bound, _percent(row.roofline_fraction), _times(row.vs_eager), _times(row.vs_compile)),
        "yes" if row.batch_invariant else "no",
    )


def _table(headings: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    rows = (headings, ("---",) * len(headings), *lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
