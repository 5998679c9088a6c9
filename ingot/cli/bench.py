"""`ingot bench`: how fast this machine is with ingot, beside its limit and beside others."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterable
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

import ingot
from ingot.cli.bench_engine import engine
from ingot.cli.bench_serve import serve
from ingot.cli.bench_train import train
from ingot.core import log
from ingot.core.device import DeviceType, resolve

if TYPE_CHECKING:
    from rich.table import Table

    from ingot.bench.ops import Bench, Row
    from ingot.bench.peaks import Peaks
    from ingot.bench.peers import Row as PeerRow
    from ingot.bench.results import Mean, Run
    from ingot.bench.train import Row as TrainRow
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
    """Time every op on realistic shapes, in memory beyond the caches, in turns with PyTorch's
    own functions and with torch.compile, as a share of what the machine could do at most.

    Examples: `ingot bench ops` for all, `ingot bench ops norm rope` for some families or ops,
    `ingot bench ops linear --plot roofline.png`, `ingot bench ops --json` for machines.

    Args:
        names: Only these ops or families.
        seconds: How long to time each contender on each shape.
        device: Where to compute.
        json: Print JSON instead of tables.
        plot: Draw a roofline into this file, .png or .svg.
        results: Add the rows to `ops.csv` in this directory.
    """
    from ingot.bench import results as kept
    from ingot.bench import roofline
    from ingot.bench.ops import Bench
    from ingot.bench.peaks import peaks
    from ingot.bench.workloads import chosen
    from ingot.observe.plot import check

    workloads = chosen(names)
    resolve(device)
    run, file = kept.Run.now(ingot.__version__, device), results and results / "ops.csv"
    # What can go wrong should do so before an hour of measuring, not after.
    if plot:
        check(plot)
    if file:
        kept.prepare(file)
    machine = peaks(place=device)
    with log.progress("filling memory", len(workloads)) as bar:
        rows = _measured(workloads, Bench(machine, seconds, place=device), run, file, bar)
    if plot:
        roofline.draw(rows, machine, run, plot)
    if json:
        print(json_format.dumps(report(rows, machine, run), indent=2))  # noqa: T201
    else:
        _print_tables(rows, machine, run)


def peers(
    model: Annotated[Path, tyro.conf.Positional],
    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME ...]")
    ] = (),
    batch: int = 1,
    prompt: int = 16,
    new: int = 128,
    rounds: int = 5,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
    results: Path | None = None,
) -> None:
    """Compare ingot with vLLM, OpenVINO GenAI, llama.cpp and transformers: all generate on the
    same weights, after the same prompts, in turns, as a share of what the machine could do at most.

    Examples: `python benchmarks/install_peers.py` once, then `ingot bench peers DIR`;
    `ingot bench peers DIR ingot openvino --batch 8 --prompt 128` for two of them.

    Args:
        model: A Hugging Face directory in bfloat16.
        names: Only these systems.
        batch: How many sequences are generated at once.
        prompt: How many tokens each prompt has.
        new: How many tokens are generated after each prompt.
        rounds: How often each system has its turn.
        json: Print JSON instead of a table.
        results: Add the rows to `peers.csv` in this directory.
    """
    from ingot.bench import peers as kin
    from ingot.bench import results as kept
    from ingot.bench.environment import clone
    from ingot.bench.peaks import peaks

    task = kin.Task(batch=batch, prompt=prompt, new=new, rounds=rounds)
    systems, known = kin.found(clone(), names), kin.Model.of(model)
    run, file = kept.Run.now(ingot.__version__), results and results / "peers.csv"
    if file:
        kept.prepare(file, kin.Row)
    machine, there = peaks(), sum(not system.missing for system in systems)
    with log.progress("starting", there * (rounds + 2)) as bar:

        def show(step: str) -> None:
            bar.describe(step)
            bar.advance()

        rows = kin.compare(systems, known, task, machine, show)
    if file:
        kept.append(file, run, rows)
    if json:
        print(json_format.dumps(report(rows, machine, run), indent=2))  # noqa: T201
    else:
        _print_peers(rows, run)


bench = {"ops": ops, "peers": peers, "engine": engine, "serve": serve, "train": train}


def report(
    rows: Iterable[Row] | Iterable[PeerRow] | Iterable[TrainRow], machine: Peaks, run: Run
) -> dict[str, Any]:
    """All of it, as `--json` prints it."""
    peaks = json_format.loads(machine.to_json())
    return {"header": {**asdict(run), "peaks": peaks}, "rows": [asdict(row) for row in rows]}


def _measured(
    workloads: list[Workload], bench: Bench, run: Run, file: Path | None, bar: log.Progress
) -> list[Row]:
    from ingot.bench import results as kept

    rows: list[Row] = []
    for workload in workloads:
        bar.describe(f"{workload.op} {workload.shape} {workload.dtype}")
        new = bench.rows(workload)
        if file:
            kept.append(file, run, new)
        rows += new
        bar.advance()
    return rows


def _print_tables(rows: list[Row], machine: Peaks, run: Run) -> None:
    from ingot.bench.results import means

    console = log.stdout()
    console.print(_table(rows))
    console.print(_means_table(means(rows)))
    console.print(
        "Times in us. limit: share of what memory or matmul would allow. aten, compile: so many "
        "times faster than PyTorch's function, and than the compiled reference. invariant: the "
        "bits of a row do not depend on the batch. The first line of a shape is the op as it is "
        "called.",
        highlight=False,
    )
    matmul = ", ".join(
        f"{dtype} {peak.value:,.0f}" for dtype, peak in machine.matmul.items() if peak
    )
    console.print(
        f"\n{run.date}, {run.cpu} ({run.isa}), torch {run.torch}, ingot {run.ingot}. Peaks: "
        f"reading {machine.read_bandwidth.value:.1f} GB/s, matmul in GFLOPS {matmul}.",
        highlight=False,
    )


def _print_peers(rows: list[PeerRow], run: Run) -> None:
    console, one = log.stdout(), rows[0]
    console.print(_peers_table(rows))
    for row in rows:
        if row.missing:
            console.print(f"{row.system} is missing: {row.missing}", highlight=False, markup=False)
    console.print(
        f"{one.model}: {one.batch} x {one.prompt} tokens in, {one.batch} x {one.new} out, "
        f"{one.rounds} rounds. tokens/s: p50 [p20-p80] of new tokens over the whole call. limit: "
        f"share of {digits(one.limit_tokens_per_s)} tokens/s, what reading the weights at "
        f"{one.read_gbs:.1f} GB/s, as measured meanwhile, and matmul would allow. agree: how many "
        "of the first tokens are the same as the first system's.",
        highlight=False,
        markup=False,  # which [p20-p80] would be taken for
    )
    console.print(
        f"\n{run.date}, {run.cpu} ({run.isa}), torch {run.torch}, ingot {run.ingot}.",
        highlight=False,
    )


def _peers_table(rows: list[PeerRow]) -> Table:
    """Those that took part, at most 100 columns wide."""
    table = _new_table("system", "version", "dtype")
    for heading in ("tokens/s", "limit", "ingot is", "first", "start", "memory", "agree"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.tokens_per_s is not None:
            table.add_row(row.system, *_peer_cells(row))
    return table


def _peer_cells(row: PeerRow) -> tuple[str, ...]:
    def figure(value: float | None, unit: str) -> str:
        return "-" if value is None else f"{digits(value)} {unit}"

    return (
        (row.version or "")[:12],
        row.dtype or "",
        f"{digits(row.tokens_per_s or 0)} [{digits(row.p20 or 0)}-{digits(row.p80 or 0)}]",
        f"{row.share_of_limit or 0:.0%}",
        times(row.ingot_faster),
        figure(row.first_token_ms, "ms"),
        figure(row.start_s, "s"),
        figure(row.memory_mb, "MB"),
        str(row.agree),
    )


def _table(rows: list[Row]) -> Table:
    """Rows by op and shape, at most 100 columns wide."""
    table = _new_table("op, shape", "dtype", "provider")
    for heading in ("p20", "p50", "p80", "rate", "limit", "aten", "compile", "invariant"):
        table.add_column(heading, justify="right", no_wrap=True)
    for op, of_op in groupby(rows, key=lambda row: row.op):
        table.add_section()
        table.add_row(f"[bold]{op}[/]")
        for shape, of_shape in groupby(of_op, key=lambda row: f"{row.shape}|{row.dtype}"):
            names = shape.split("|")
            for row in of_shape:
                table.add_row(*names, *_cells(row))
                names = ["", ""]
    return table


def _cells(row: Row) -> tuple[str, ...]:
    rate = f"{digits(row.gbs)} GB/s" if row.limit == "memory" else f"{digits(row.gflops)} GF/s"
    return (
        row.provider,
        *(digits(time) for time in (row.p20_us, row.p50_us, row.p80_us)),
        rate,
        f"{row.share_of_limit:.0%}",
        times(row.vs_aten),
        times(row.vs_compile),
        "yes" if row.batch_invariant else "-",
    )


def _means_table(means: list[Mean]) -> Table:
    table = _new_table("geometric means")
    for heading in ("shapes", "limit", "aten", "compile"):
        table.add_column(heading, justify="right")
    for mean in means:
        share = "-" if mean.share_of_limit is None else f"{mean.share_of_limit:.0%}"
        speedups = times(mean.vs_aten), times(mean.vs_compile)
        table.add_row(mean.family, str(mean.workloads), share, *speedups)
    return table


def _new_table(*headings: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=0)
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def digits(value: float) -> str:
    """Three digits, and no exponent.

    >>> digits(3.14159), digits(41.27), digits(271828.0)
    ('3.14', '41.3', '271828')
    """
    return f"{value:.{max(0, 3 - len(str(int(value))))}f}"


def times(ratio: float | None) -> str:
    """A ratio of speeds.

    >>> times(1.234), times(None)
    ('1.23x', '-')
    """
    return "-" if ratio is None else f"{digits(ratio)}x"
