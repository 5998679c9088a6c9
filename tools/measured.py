"""Writes measured speeds into their docs page while the site is built.

A hook of mkdocs: the tables are made from `benchmarks/results` at every build, so they say what the
last `ingot bench ops`, `peers` and `train` with `--results benchmarks/results` have measured.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ingot.bench.ops import Row
from ingot.bench.results import Record, latest, means, read, served
from ingot.bench.train import options

_Line = dict[str, str]

RESULTS = Path(__file__).parent.parent / "benchmarks/results"
PLACE, PEERS_PLACE = "<!-- measured -->", "<!-- measured peers -->"
TRAIN_PLACE = "<!-- measured train -->"
_MEANS = ("family", "shapes", "share of limit", "vs aten", "vs compile")
_LINES = (
    *("op", "shape", "dtype", "provider", "p50, us", "limit", "share of limit"),
    *("vs aten", "vs compile", "batch-invariant"),
)
_PEERS = (
    *("system", "version", "dtype", "tokens/s", "share of limit", "ingot is"),
    *("first token", "start", "memory"),
)
_TRAIN = ("system", "tokens/s", "limit", "ingot is", "fwd, bwd, upd in ms", "GB, step, kept")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the tables where the page asks for them."""
    if page.file.src_uri != "bench.md":
        return markdown
    ops = RESULTS / "ops.csv"
    markdown = markdown.replace(PLACE, render(latest(read(ops)) if ops.exists() else []))
    markdown = markdown.replace(PEERS_PLACE, render_peers(RESULTS / "peers.csv"))
    return markdown.replace(TRAIN_PLACE, render_train(RESULTS / "train.csv"))


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


def render_peers(path: Path) -> str:
    """For each model and size of batch and texts, the systems of the last run that is kept."""
    return _runs(path, ("model", "batch", "prompt", "new"), _render_task)


def render_train(path: Path) -> str:
    """For each model and size of batch, the systems of the last run that is kept."""
    return _runs(path, ("model", "batch", "length"), _render_steps)


def _runs(path: Path, task: tuple[str, ...], render: Callable[[list[_Line]], str]) -> str:
    if not path.exists():
        return "No run is kept yet."
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
        f"{one['model']}, {one['batch']} x {one['prompt']} tokens in, {one['batch']} x "
        f"{one['new']} out, {one['rounds']} rounds, reading at {one['read_gbs']} GB/s "
        "meanwhile.\n\n" + _table(_PEERS, map(_peer_line, rows))
    )


def _peer_line(row: _Line) -> tuple[str, ...]:
    if row["missing"]:
        return (row["system"], f"missing: {row['missing']}", *("-" for _ in _PEERS[2:]))
    return (
        *(row["system"], row["version"], row["dtype"]),
        f"{row['tokens_per_s']} ({row['p20']} to {row['p80']})",
        *(_percent(float(row["share_of_limit"])), _times(float(row["ingot_faster"]))),
        *(f"{row['first_token_ms']} ms", f"{row['start_s']} s", f"{row['memory_mb']} MB"),
    )


def _render_steps(rows: list[_Line]) -> str:
    one = rows[0]
    return (
        f"Measured {one['date'][:10]} on {one['cpu']} ({one['isa']}), torch {one['torch']}, ingot "
        f"{one['ingot']}: {one['model']}, {one['batch']} x {one['length']} tokens a step, "
        f"{one['rounds']} rounds.\n\n" + _table(_TRAIN, map(_step_line, rows))
    )


def _step_line(row: _Line) -> tuple[str, ...]:
    if row["missing"]:
        return (row["system"], f"missing: {row['missing']}", *("-" for _ in _TRAIN[2:]))
    others = options(row["recompute"], row["moments"])
    parts, memory = ("forward", "backward", "update"), ("peak", "step", "activation")
    return (
        f"{row['system']} {row['version']}, {row['precision']}" + (others and f", {others}"),
        f"{row['tokens_per_s']} ({row['p20']} to {row['p80']})",
        _percent(float(row["share_of_limit"])) if row["share_of_limit"] else "-",
        _times(float(row["ingot_faster"])) if row["ingot_faster"] else "-",
        ", ".join(f"{1e3 * float(row[f'{part}_s']):.0f}" for part in parts),
        ", ".join(f"{int(row[f'{part}_memory_bytes']) / 1e9:.2f}" for part in memory),
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
        "yes" if row.batch_invariant else "no",
    )


def _table(headings: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    rows = (headings, ("---",) * len(headings), *lines)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}x"
