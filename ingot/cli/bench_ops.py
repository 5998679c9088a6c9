"""`ingot bench ops`: the time of every op, compared with the roofline and with PyTorch."""

from __future__ import annotations

import json as json_format
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

import ingot
from ingot.cli.tables import digits, new_table, percent, speedup
from ingot.core import log
from ingot.core.device import DeviceType, resolve

if TYPE_CHECKING:
    from rich.table import Table

    from ingot.bench.ops import OpBench, OpRow
    from ingot.bench.peaks import Peaks
    from ingot.bench.results import FamilyMean, RunInfo
    from ingot.bench.workloads import Workload


def ops(
    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME ...]")
    ] = (),
    seconds: float = 0.3,
    device: DeviceType = "cpu",
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
    plot: Path | None = None,
    results: Path | None = None,
) -> None:
    """Time every op on realistic shapes with cold caches, interleaved with PyTorch's own functions
    and with torch.compile, and compare with the machine's roofline.

    Examples: `ingot bench ops` for all, `ingot bench ops norm rope` for some families or ops,
    `ingot bench ops linear --plot roofline.png`, `ingot bench ops --json` for scripts.

    Args:
        names: Only these ops or families.
        seconds: Time spent on each implementation of each shape.
        device: Device to run on.
        json: Print JSON instead of tables.
        plot: Draw a roofline plot into this file, .png or .svg.
        results: Append the rows to `ops.csv` in this directory.
    """
    from ingot.bench import machine, roofline
    from ingot.bench import results as csv_files
    from ingot.bench.ops import OpBench
    from ingot.bench.workloads import select_workloads
    from ingot.observe.plot import check

    workloads = select_workloads(names)
    resolve(device)
    run = csv_files.RunInfo.now(ingot.__version__, device)
    file = results and results / "ops.csv"
    # Invalid arguments should fail before an hour of measuring, not after.
    if plot:
        check(plot)
    if file:
        csv_files.prepare(file)
    peaks = machine.peaks(device=device)
    with log.progress("filling memory", len(workloads)) as bar:
        rows = _measure(workloads, OpBench(peaks, seconds, device=device), run, file, bar)
    if plot:
        roofline.draw(rows, peaks, run, plot)
    if json:
        print(json_format.dumps(csv_files.report(rows, peaks, run), indent=2))  # noqa: T201
    else:
        _print_tables(rows, peaks, run)


def _measure(
    workloads: list[Workload], bench: OpBench, run: RunInfo, file: Path | None, bar: log.Progress
) -> list[OpRow]:
    from ingot.bench import results as csv_files

    rows: list[OpRow] = []
    for workload in workloads:
        bar.describe(f"{workload.op} {workload.shape} {workload.dtype}")
        new = bench.rows(workload)
        if file:
            csv_files.append(file, run, new)
        rows += new
        bar.advance()
    return rows


def _print_tables(rows: list[OpRow], peaks: Peaks, run: RunInfo) -> None:
    from ingot.bench.results import family_means

    console = log.stdout()
    console.print(_table(rows))
    console.print(_means_table(family_means(rows)))
    console.print(
        "Times in us. roofline: fraction of the speed that memory bandwidth or matmul peak allows. "
        "vs eager, vs compile: speedup over PyTorch's own function and over the compiled "
        "reference. invariant: the bits of a row do not depend on the rest of the batch. The first "
        "line of a shape is the op as it is called.",
        highlight=False,
    )
    matmul = ", ".join(f"{dtype} {peak.value:,.0f}" for dtype, peak in peaks.matmul.items() if peak)
    console.print(
        f"\n{run}. Peaks: reading {peaks.read_bandwidth.value:.1f} GB/s, matmul {matmul} GFLOPS.",
        highlight=False,
    )


def _table(rows: list[OpRow]) -> Table:
    """Build the table of all rows by op and shape, at most 100 columns wide."""
    table = new_table(
        ("op, shape", "dtype", "provider"),
        ("p20", "p50", "p80", "rate", "roof-\nline", "vs\neager", "vs\ncompile", "inva-\nriant"),
        padding=0,
    )
    for op, of_op in groupby(rows, key=lambda row: row.op):
        table.add_section()
        table.add_row(f"[bold]{op}[/]")
        for shape, of_shape in groupby(of_op, key=lambda row: f"{row.shape}|{row.dtype}"):
            names = shape.split("|")
            for row in of_shape:
                table.add_row(*names, *_cells(row))
                names = ["", ""]
    return table


def _cells(row: OpRow) -> tuple[str, ...]:
    rate = f"{digits(row.gbs)} GB/s" if row.bound == "memory" else f"{digits(row.gflops)} GF/s"
    return (
        row.provider,
        *(digits(time) for time in (row.p20_us, row.p50_us, row.p80_us)),
        rate,
        percent(row.roofline_fraction),
        speedup(row.vs_eager),
        speedup(row.vs_compile),
        "yes" if row.batch_invariant else "-",
    )


def _means_table(means: list[FamilyMean]) -> Table:
    headings = ("shapes", "roofline", "vs eager", "vs compile")
    table = new_table(("geometric means",), headings, padding=(0, 1, 0, 0))
    for mean in means:
        fraction = percent(mean.roofline_fraction)
        speedups = speedup(mean.vs_eager), speedup(mean.vs_compile)
        table.add_row(mean.family, str(mean.workloads), fraction, *speedups)
    return table
