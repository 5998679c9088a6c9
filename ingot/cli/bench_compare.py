"""`ingot bench compare`: generation with ingot and with other systems."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

import ingot
from ingot.cli.tables import digits, new_table, percent, speedup
from ingot.core import log

if TYPE_CHECKING:
    from rich.table import Table

    from ingot.bench.compare import CompareRow
    from ingot.bench.results import RunInfo


def compare(
    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME ...]")
    ] = (),
    batch_size: int = 1,
    input_len: int = 16,
    output_len: int = 128,
    rounds: int = 5,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
    results: Path | None = None,
) -> None:
    """Compare ingot with vLLM, OpenVINO GenAI, llama.cpp and transformers: all generate from the
    same weights and the same prompts, interleaved.

    Examples: `python benchmarks/install_peers.py` once, then `ingot bench compare smollm2`;
    `ingot bench compare smollm2 ingot openvino --batch-size 8 --input-len 128` for two of them.

    Args:
        model: A model directory in bfloat16 or of `ingot compress`, or ORG/NAME on the hub.
        names: Only these systems.
        batch_size: Number of sequences generated at once.
        input_len: Number of tokens of each prompt.
        output_len: Number of tokens generated after each prompt.
        rounds: Number of measured rounds.
        json: Print JSON instead of a table.
        results: Append the rows to `compare.csv` in this directory.
    """
    from ingot.bench import compare as systems_bench
    from ingot.bench import machine
    from ingot.bench import results as csv_files
    from ingot.bench.environment import peers_folder
    from ingot.interop import hub

    task = systems_bench.GenerationTask(
        batch_size=batch_size, input_len=input_len, output_len=output_len, rounds=rounds
    )
    systems = systems_bench.find_systems(peers_folder(), names)
    cost = systems_bench.ModelCost.read(hub.model_path(model))
    run = csv_files.RunInfo.now(ingot.__version__)
    file = results and results / "compare.csv"
    if file:
        csv_files.prepare(file, systems_bench.CompareRow)
    peaks, available = machine.peaks(), sum(not system.error for system in systems)
    with log.progress("starting", available * (rounds + 2)) as bar:

        def show(step: str) -> None:
            bar.describe(step)
            bar.advance()

        rows = systems_bench.compare(systems, cost, task, peaks, show)
    if file:
        csv_files.append(file, run, rows)
    if json:
        print(json_format.dumps(csv_files.report(rows, peaks, run), indent=2))  # noqa: T201
    else:
        _print(rows, run)


def _print(rows: list[CompareRow], run: RunInfo) -> None:
    console, one = log.stdout(), rows[0]
    console.print(_table(rows))
    for row in rows:
        if row.error:
            console.print(f"{row.system}: {row.error}", highlight=False, markup=False)
    console.print(
        f"{one.model}: {one.batch_size} x {one.input_len} tokens in, {one.batch_size} x "
        f"{one.output_len} out, {one.rounds} rounds. tokens/s: p50 [p20-p80] of output tokens over "
        f"the whole call. roofline: fraction of {digits(one.roofline_tokens_per_s)} tokens/s, "
        f"which the bandwidth of {one.read_gbs:.1f} GB/s measured in these rounds and the matmul "
        "peak allow. speedup: of ingot over this system. memory: at its peak. match: leading "
        "tokens that equal the first system's.",
        highlight=False,
        markup=False,  # [p20-p80] is not markup
    )
    console.print(f"\n{run}.", highlight=False)


def _table(rows: list[CompareRow]) -> Table:
    """Build the table of the systems that succeeded, at most 100 columns wide."""
    headings = ("tokens/s", "roofline", "speedup", "TTFT", "load", "memory", "match")
    table = new_table(("system", "version", "dtype"), headings, padding=0)
    for row in rows:
        if row.tokens_per_s is not None:
            table.add_row(row.system, *_cells(row))
    return table


def _cells(row: CompareRow) -> tuple[str, ...]:
    def measurement(value: float | None, unit: str) -> str:
        return "-" if value is None else f"{digits(value)} {unit}"

    return (
        (row.version or "")[:8],
        row.dtype or "",
        f"{digits(row.tokens_per_s or 0)} [{digits(row.p20 or 0)}-{digits(row.p80 or 0)}]",
        percent(row.roofline_fraction),
        speedup(row.speedup),
        measurement(row.ttft_ms, "ms"),
        measurement(row.load_s, "s"),
        measurement(row.peak_memory_mb, "MB"),
        str(row.matching_tokens),
    )
