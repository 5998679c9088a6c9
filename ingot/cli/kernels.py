"""`ingot kernels`: the GPU kernels as machine code, without a GPU."""

from __future__ import annotations

import json as json_format
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ingot.core.errors import IngotError, UnknownName
from ingot.core.log import progress, stdout

if TYPE_CHECKING:
    from ingot.kernels.triton.compiler import CompiledKernel


def kernels(
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[OP ...]")] = (),
    target: tuple[str, ...] = (),
    quick: tyro.conf.FlagCreatePairsOff[bool] = False,
    numbers: tyro.conf.FlagCreatePairsOff[bool] = False,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
    page: Path | None = None,
    defaults: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Compile the GPU kernels for GPUs that need not be there, and say what is in the code:
    registers, spills, shared memory, occupancy, widths of loads and stores, tensor-core
    instructions, asynchronous copies, and how fast the chip would allow the op to be.

    Nothing is compiled twice. What a GPU would measure is not here: nothing is run.

    Examples: `ingot kernels --quick` for the configurations that a call would get, `ingot kernels
    linear --target sm_90` for one op and GPU, `ingot kernels --json` for machines,
    `ingot kernels --numbers` for the errors of the kernels in Triton's interpreter.

    Args:
        names: Only these ops.
        target: Only these GPUs: sm_80, sm_90, sm_100, sm_120, gfx942.
        quick: Only the configuration that a call would get, not the whole tuning space.
        numbers: Run every sample in the interpreter instead, and show the worst errors.
        json: Print JSON instead of tables.
        page: Write the tables into this page of the documentation; with --numbers, the errors.
        defaults: Choose the default configurations anew, from the compiled code.
    """
    from ingot.kernels.triton import require_triton

    require_triton()
    from ingot.kernels.triton import report

    if numbers:
        with progress("interpreting", None) as bar:
            errors = report.numbers(names, done=bar.advance)
        if page:
            report.write_numbers(page, errors)
        _print(report.number_rows(errors), "worst errors as shares of their bounds", json)
        return
    found, seconds = compiled(names, target, quick)
    if defaults:
        report.write_defaults(found)
    if page:
        report.write_page(page, found, seconds)
    if json:
        print(json_format.dumps([fact.row for fact in found], indent=2))  # noqa: T201
    else:
        _print(report.fact_rows(found), "", False)
        _print(report.roofline_rows(names), "least time of the representative call", False)
        stdout().print(report.summary(found, seconds), highlight=False)
    wrong = report.wrong(found)
    if wrong:
        raise IngotError(
            f"{len(wrong)} kernels are not as they should be: " + "; ".join(wrong[:5]),
            hint="change the kernel or take the configuration out of its tuning space",
        )


def compiled(
    names: tuple[str, ...], targets: tuple[str, ...], quick: bool
) -> tuple[list[CompiledKernel], float]:
    """The facts about these kernels, and how long it took."""
    from ingot.kernels.triton.compiler import compile_all, jobs
    from ingot.kernels.triton.provider import triton_ops
    from ingot.kernels.triton.target import TARGETS

    for name in names:
        if name not in triton_ops():
            raise UnknownName("op with GPU kernels", name, triton_ops())
    for target in targets:
        if target not in TARGETS:
            raise UnknownName("GPU target", target, TARGETS)
    start = time.monotonic()
    wanted = jobs(names, targets or tuple(TARGETS), every_config=not quick)
    with progress("compiling", len(wanted)) as bar:
        found = compile_all(wanted, done=bar.advance)
    return found, time.monotonic() - start


def _print(rows: list[dict[str, Any]], title: str, json: bool) -> None:
    if json:
        print(json_format.dumps(rows, indent=2))  # noqa: T201
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title or None)
    for heading in rows[0] if rows else ():
        table.add_column(heading, no_wrap=True)
    for row in rows:
        table.add_row(*map(str, row.values()))
    stdout().print(table)
