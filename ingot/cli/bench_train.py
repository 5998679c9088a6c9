"""`ingot bench train`: a training step beside plain PyTorch, torch.compile and Trainer."""

from __future__ import annotations

import json as json_format
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

import ingot
from ingot.core import log
from ingot.core.errors import UnknownName

if TYPE_CHECKING:
    from rich.table import Table

    from ingot.bench.results import Run
    from ingot.bench.train import Contender, Row, Summary

PRESET = "gpt2-124m"


def train(
    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[SYSTEM ...]")
    ] = (),
    model: Path | None = None,
    batch: int = 4,
    length: int = 512,
    rounds: int = 5,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
    results: Path | None = None,
) -> None:
    """Time a step of GPT-2 124M in bfloat16 (forward, backward, update) in turns with plain
    PyTorch, torch.compile and transformers' Trainer on the same weights and batches; in float32,
    and with options that take less memory.

    Examples: `ingot bench train`, `ingot bench train ingot compile --rounds 9`,
    `ingot bench train --json` for machines.

    Args:
        names: Only these systems: ingot, eager, compile, trainer.
        model: A directory of GPT-2's kind; one of random weights if left out.
        batch: Sequences of a step.
        length: Tokens of each.
        rounds: How often each has its turn.
        json: Print JSON instead of a table.
        results: Add the rows to `train.csv` in this directory.
    """
    from ingot.bench import results as kept
    from ingot.bench import train as steps
    from ingot.bench.peaks import peaks
    from ingot.cli.bench import report

    task = steps.Task(batch=batch, length=length, rounds=rounds)
    contenders = _chosen(names, steps.CONTENDERS)
    run, file = kept.Run.now(ingot.__version__), results and results / "train.csv"
    if file:
        kept.prepare(file, steps.Row)
    machine = peaks()
    with _directory(model) as directory, log.progress("", len(contenders) * rounds + 1) as bar:

        def show(text: str) -> None:
            bar.advance()
            bar.describe(text)

        rows = steps.compare(contenders, directory, task, machine, show)
    if file:
        kept.append(file, run, rows)
    found = steps.summary(rows)
    if json:
        content = {**report(rows, machine, run), "summary": asdict(found)}
        print(json_format.dumps(content, indent=2))  # noqa: T201
    else:
        _print(rows, found, run)


def _chosen(names: tuple[str, ...], contenders: tuple[Contender, ...]) -> list[Contender]:
    known = {contender.system for contender in contenders}
    for name in names:
        if name not in known:
            raise UnknownName("system", name, known)
    return [contender for contender in contenders if not names or contender.system in names]


@contextmanager
def _directory(model: Path | None) -> Generator[Path]:
    from ingot.bench import plain
    from ingot.interop import hf
    from ingot.nn import Decoder, preset

    if model is not None:
        plain.check(model)
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / PRESET
        hf.save(Decoder.from_config(preset(PRESET), seed=0), directory)
        yield directory


def _print(rows: list[Row], found: Summary, run: Run) -> None:
    console, one = log.stdout(), rows[0]
    console.print(_table(rows))
    for row in rows:
        if row.missing:
            console.print(f"{row.system} is missing: {row.missing}", highlight=False, markup=False)
    for line in _conclusions(found):
        console.print(line, highlight=False)
    console.print(
        f"\n{one.model}, {one.batch} x {one.length} tokens a step, {one.rounds} rounds. selective, "
        "full: what is computed again. fwd, bwd, upd: forward, backward, update in ms. GB: the "
        "most memory; step: of it what is not held between steps; kept: what a forward leaves for "
        "the backward. limit: 6 FLOPs for each parameter and token, of the machine's matmul peak "
        f"in that dtype.\n{run.date}, {run.cpu} ({run.isa}), torch {run.torch}, ingot {run.ingot}.",
        highlight=False,
    )


def _table(rows: list[Row]) -> Table:
    """Those that took part, at most 100 columns wide."""
    from rich import box
    from rich.table import Table

    from ingot.bench.train import options

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for heading in ("system", "dtype", "options"):
        table.add_column(heading, no_wrap=True)
    headings = (
        "tokens/s",
        "limit",
        "ingot is",
        "fwd",
        "bwd",
        "upd",
        "GB",
        "step",
        "kept",
    )
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        if row.tokens_per_s is not None:
            others = (
                options(row.recompute, row.moments).replace("recompute ", "").replace(", ", "\n")
            )
            table.add_row(row.system, row.precision, others, *_cells(row))
    return table


_MEMORY = ("peak", "step", "activation")


def _cells(row: Row) -> tuple[str, ...]:
    share = "-" if row.share_of_limit is None else f"{row.share_of_limit:.0%}"
    return (
        f"{row.tokens_per_s or 0:,.0f} \\[{row.p20 or 0:,.0f}-{row.p80 or 0:,.0f}]",
        share,
        "-" if row.ingot_faster is None else f"{row.ingot_faster:.2f}x",
        *(f"{1e3 * (t or 0):,.0f}" for t in (row.forward_s, row.backward_s, row.update_s)),
        *(f"{(getattr(row, f'{n}_memory_bytes') or 0) / 1e9:.2f}" for n in _MEMORY),
    )


def _conclusions(found: Summary) -> list[str]:
    lines: list[str] = []
    if found.faster is not None and found.memory is not None:
        lines.append(
            f"{found.faster:.2f}x as fast as the best other ({found.best_peer}), with "
            f"{found.memory:.2f} of its memory"
        )
    if found.backward_over_forward is not None:
        lines.append(f"the backward takes {found.backward_over_forward:.2f} forwards")
    if found.bf16_over_fp32 is not None:
        lines.append(f"bf16 is {found.bf16_over_fp32:.2f}x as fast as fp32")
    for name, of in found.options.items():
        beside = f"; {of['memory']:.2f} of the best other's memory" if of["memory"] else ""
        lines.append(
            f"{name}: {of['activation_memory_saved']:.0%} of activations saved, "
            f"{of['peak_memory_saved']:.0%} of the peak, {of['time'] or 0:.2f}x the time{beside}"
        )
    return lines
