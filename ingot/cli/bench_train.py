"""`ingot bench train`: a training step, compared with PyTorch, transformers and PEFT."""

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
from ingot.cli.tables import new_table, percent
from ingot.core import log
from ingot.core.errors import UnknownName

if TYPE_CHECKING:
    from rich.table import Table

    from ingot.bench.results import RunInfo
    from ingot.bench.train import TrainingSystem, TrainRow, TrainSummary

PRESET = "gpt2-124m"


def train(
    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[SYSTEM ...]")
    ] = (),
    model: Path | None = None,
    batch_size: int = 4,
    seq_len: int = 512,
    rounds: int = 5,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
    results: Path | None = None,
) -> None:
    """Time a training step of GPT-2 124M in bfloat16 (forward, backward, optimizer), interleaved
    with eager PyTorch, torch.compile and transformers' Trainer on the same weights and batches;
    also in float32 and with options that use less memory, and training a LoRA adapter, compared
    with PEFT.

    Examples: `ingot bench train`, `ingot bench train "ingot bf16" compile --rounds 9`,
    `ingot bench train "ingot bf16" lora peft --model smollm2`.

    Args:
        names: Only these systems: ingot, eager, compile, trainer, lora, peft; "ingot bf16" is
            ingot without its other options.
        model: Model directory; a GPT-2 for eager and compile; random weights if left out.
        batch_size: Number of sequences of a step.
        seq_len: Number of tokens of each sequence.
        rounds: Number of measured rounds.
        json: Print JSON instead of a table.
        results: Append the rows to `train.csv` in this directory.
    """
    from ingot.bench import machine
    from ingot.bench import results as csv_files
    from ingot.bench import train as steps_bench
    from ingot.bench.gpt2_baseline import check_gpt2

    task = steps_bench.TrainTask(batch_size=batch_size, seq_len=seq_len, rounds=rounds)
    systems = _select(names, steps_bench.SYSTEMS)
    if model is not None and {"eager", "compile"} & {system.system for system in systems}:
        check_gpt2(model)
    run = csv_files.RunInfo.now(ingot.__version__)
    file = results and results / "train.csv"
    if file:
        csv_files.prepare(file, steps_bench.TrainRow)
    peaks = machine.peaks()
    with _directory(model) as directory, log.progress("", len(systems) * rounds + 1) as bar:

        def show(text: str) -> None:
            bar.advance()
            bar.describe(text)

        rows = steps_bench.compare(systems, directory, task, peaks, show)
    if file:
        csv_files.append(file, run, rows)
    summary = steps_bench.summarize(rows)
    if json:
        content = {**csv_files.report(rows, peaks, run), "summary": asdict(summary)}
        print(json_format.dumps(content, indent=2))  # noqa: T201
    else:
        _print(rows, summary, run)


def _select(names: tuple[str, ...], systems: tuple[TrainingSystem, ...]) -> list[TrainingSystem]:
    known = {name for system in systems for name in (system.system, system.name)}
    for name in names:
        if name not in known:
            raise UnknownName("system", name, known)
    return [system for system in systems if not names or {system.system, system.name} & set(names)]


@contextmanager
def _directory(model: Path | None) -> Generator[Path]:
    from ingot.interop import hf
    from ingot.nn import Decoder, preset

    if model is not None:
        yield model
        return
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / PRESET
        hf.save(Decoder.from_config(preset(PRESET), seed=0), directory)
        yield directory


def _print(rows: list[TrainRow], summary: TrainSummary, run: RunInfo) -> None:
    console, one = log.stdout(), rows[0]
    console.print(_table(rows))
    for row in rows:
        if row.error:
            console.print(f"{row.system}: {row.error}", highlight=False, markup=False)
    for line in _conclusions(summary):
        console.print(line, highlight=False)
    console.print(
        f"\n{one.model}, {one.batch_size} x {one.seq_len} tokens per step, rounds: {one.rounds}. "
        "tokens/s: p50 \\[p20-p80]. roofline: fraction of the matmul peak in that dtype, at 6 "
        "FLOPs per parameter and token. speedup: of ingot over this system. selective, full: "
        "activation recomputation. fwd, bwd, opt: forward, backward, optimizer in ms. peak: memory "
        "in GB; step: the part that is not held between steps; act: activations kept for the "
        f"backward pass.\n{run}.",
        highlight=False,
    )


def _table(rows: list[TrainRow]) -> Table:
    """Build the table of the systems that succeeded, at most 100 columns wide."""
    from ingot.bench.train import describe_options

    headings = ("tokens/s", "roofline", "speedup", "fwd", "bwd", "opt", "peak", "step", "act")
    table = new_table(
        ("system", "dtype", "options"), headings, padding=(0, 1, 0, 0), show_edge=False
    )
    for row in rows:
        if row.tokens_per_s is not None:
            options = describe_options(row.recompute, row.state_dtype)
            options = options.replace("recompute ", "").replace(", ", "\n")
            table.add_row(row.system, row.precision, options, *_cells(row))
    return table


_MEMORY = ("peak", "step", "activation")


def _cells(row: TrainRow) -> tuple[str, ...]:
    return (
        f"{row.tokens_per_s or 0:,.0f} \\[{row.p20 or 0:,.0f}-{row.p80 or 0:,.0f}]",
        percent(row.roofline_fraction),
        "-" if row.speedup is None else f"{row.speedup:.2f}x",
        *(f"{1e3 * (t or 0):,.0f}" for t in (row.forward_s, row.backward_s, row.optimizer_s)),
        *(f"{(getattr(row, f'{n}_memory_bytes') or 0) / 1e9:.2f}" for n in _MEMORY),
    )


def _conclusions(summary: TrainSummary) -> list[str]:
    lines: list[str] = []
    if summary.speedup is not None and summary.memory_ratio is not None:
        lines.append(
            f"ingot: {summary.speedup:.2f}x the speed of the best peer ({summary.best_peer}), "
            f"{summary.memory_ratio:.0%} of its memory"
        )
    if summary.backward_over_forward is not None:
        lines.append(f"backward / forward: {summary.backward_over_forward:.2f}x the time")
    if summary.bf16_over_fp32 is not None:
        lines.append(f"bf16 / fp32: {summary.bf16_over_fp32:.2f}x the speed")
    if summary.lora_over_full is not None and summary.lora_idle_memory_ratio is not None:
        lines.append(
            f"LoRA / full: {summary.lora_over_full:.2f}x the speed, "
            f"{summary.lora_idle_memory_ratio:.0%} of the memory between steps, libraries included"
        )
    for precision, speedup in summary.lora_over_peft.items():
        lines.append(f"LoRA in {precision}: {speedup:.2f}x the speed of PEFT")
    for name, of in summary.options.items():
        peer = f"; {of['memory_ratio']:.0%} of the best peer's memory" if of["memory_ratio"] else ""
        lines.append(
            f"{name}: saves {of['activation_memory_saved']:.0%} of the activations, "
            f"{of['peak_memory_saved']:.0%} of the peak, at {of['time_ratio'] or 0:.2f}x the "
            f"time{peer}"
        )
    return lines
