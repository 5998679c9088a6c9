"""Regenerate the tables of docs/gpu-kernels.md: `python -m tools.gpu_page`.

Run this after a change to a GPU kernel, its tuning space or its defaults. It compiles every kernel
in its default configuration for all targets (about four minutes on two cores if nothing is cached)
and writes the tables of compiled code, ceilings, rooflines and traffic. With `--accuracy` it runs
every sample of the op records in Triton's interpreter instead, which takes several minutes, and
writes the table of errors. Needs `pip install 'ingot[gpu]'`, but no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ingot.core import paths
from ingot.core.device import detect
from ingot.kernels.triton import report
from ingot.kernels.triton.codegen_checks import ALLOWED_SPILLS
from ingot.kernels.triton.compiler import CompiledKernel, compile_all, compile_jobs
from ingot.kernels.triton.target import TARGETS

PAGE = Path(__file__).parent.parent / "docs" / "gpu-kernels.md"


def main(argv: Sequence[str] | None = None) -> None:
    """Write the tables into the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_page", description=__doc__)
    parser.add_argument("--accuracy", action="store_true", help="update the table of errors only")
    parser.add_argument("--page", type=Path, default=PAGE, help="the Markdown file to update")
    options = parser.parse_args(argv)
    if options.accuracy:
        write_accuracy(options.page, report.measure_accuracy())
    else:
        start = time.monotonic()
        kernels = compile_all(compile_jobs(all_configs=False))
        write_tables(options.page, kernels, time.monotonic() - start)


def write_tables(page: Path, kernels: Sequence[CompiledKernel], seconds: float) -> None:
    """Write the tables of compiled code, ceilings, rooflines and traffic."""
    write_section(page, "summary", _run_summary(kernels, seconds))
    write_section(page, "kernels", markdown(report.kernel_rows(first_launches(kernels))))
    write_section(page, "ceilings", markdown(report.ceiling_rows()))
    write_section(page, "roofline", markdown(report.roofline_rows()))
    write_section(page, "traffic", markdown(report.traffic_rows()))


def write_accuracy(page: Path, accuracy: report.Accuracy) -> None:
    """Write the table of errors."""
    run = f"Triton {version('triton')}, {datetime.date.today()}."
    write_section(page, "accuracy", f"{run}\n\n{markdown(report.accuracy_rows(accuracy))}")


def write_section(page: Path, name: str, content: str) -> None:
    """Replace the text between the markers of a section."""
    begin, end = f"<!-- {name} -->", f"<!-- end {name} -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    paths.write_atomic(page, f"{before}{begin}\n\n{content}\n\n{end}{after}")


def first_launches(kernels: Sequence[CompiledKernel]) -> list[CompiledKernel]:
    """Return one launch of each kernel for each target."""
    first: dict[tuple[str, str], CompiledKernel] = {}
    for compiled in kernels:
        first.setdefault((compiled.kernel, compiled.target), compiled)
    order = list(TARGETS)
    return sorted(first.values(), key=lambda c: (c.kernel, order.index(c.target)))


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table.

    >>> print(markdown([{"op": "silu", "cases": 28}]))
    | op | cases |
    | --- | --- |
    | silu | 28 |
    """
    headings = list(rows[0])
    lines = [headings, ["---"] * len(headings), *([str(v) for v in r.values()] for r in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _run_summary(kernels: Sequence[CompiledKernel], seconds: float) -> str:
    cpu = detect().cpu
    reasons = "".join(
        f"\n- {kernel} on {target}: {why}" for (kernel, target), why in ALLOWED_SPILLS.items()
    )
    return (
        f"{datetime.date.today()}, Triton {version('triton')}, {cpu.cores} cores of "
        f"{cpu.name}: {report.summary(kernels, seconds)} (cached binaries are not recompiled)."
        f"{reasons}"
    )


if __name__ == "__main__":
    main()
