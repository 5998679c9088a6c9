"""`ingot explain`: where a model spends its time, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ingot.cli import escape_markup
from ingot.core.log import stdout

if TYPE_CHECKING:
    from ingot.workflows.explain import Explanation, Machine

_MAX_ROWS = 12
_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def explain(
    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")],
    batch: int = 1,
    length: int = 128,
    out: Path = Path("explain"),
) -> None:
    """Show where a PyTorch model spends its time, what limits it and what to do about it.

    Runs one forward pass call by call, compares each kind of call with the roofline of this
    machine, then times the model before and after `ingot.optimize`. A page with the roofline plot
    is written to `--out`. Examples: `ingot explain model_dir`, `ingot explain slow.py:build`.

    Args:
        target: A model directory that transformers reads, or file.py:function, a function that
            returns the model and a tuple of its inputs.
        batch: Number of sequences, for a directory.
        length: Tokens of each sequence, for a directory.
        out: Directory of the page.
    """
    from ingot.workflows import explain as workflow

    model, inputs = workflow.load_target(target, batch, length)
    result = workflow.explain(model, inputs, machine(), name=target)
    _print(result)
    path = workflow.write_page(result, out)
    stdout().print(f"\n{escape_markup(str(path))}")


def machine() -> Machine:
    """Return the peaks of this machine, measured once."""
    from ingot.bench.machine import peaks
    from ingot.workflows.explain import Machine

    measured = peaks()
    gflops = {
        _DTYPES[dtype]: peak.value
        for dtype, peak in measured.matmul.items()
        if peak is not None and dtype in _DTYPES
    }
    return Machine(bandwidth=measured.read_bandwidth.value, gflops=gflops)


def _print(result: Explanation) -> None:
    from ingot.cli.tables import new_table
    from ingot.workflows.explain import HEADINGS

    table = new_table(HEADINGS[:1], HEADINGS[1:])
    for group in result.groups[:_MAX_ROWS]:
        table.add_row(*(escape_markup(cell) for cell in group.row()))
    console = stdout()
    console.print(table)
    eager, optimized = result.eager_seconds * 1e3, result.optimized_seconds * 1e3
    console.print(f"eager {eager:.2f} ms, optimized {optimized:.2f} ms: {eager / optimized:.2f}x")
    for number, advice in enumerate(result.advice, start=1):
        console.print(f"{number}. {escape_markup(advice.text)}")
    if not result.advice:
        console.print("nothing to do that would save 2 % of the time")
