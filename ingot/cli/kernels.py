"""`ingot kernels`: compile the GPU kernels and inspect their machine code, without a GPU."""

from __future__ import annotations

import json as json_format
import time
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ingot.cli.tables import new_table
from ingot.core.errors import IngotError, UnknownName
from ingot.core.log import progress, stdout

if TYPE_CHECKING:
    from ingot.kernels.triton.compiler import CompiledKernel


def kernels(
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[OP ...]")] = (),
    target: tuple[str, ...] = (),
    default_configs: tyro.conf.FlagCreatePairsOff[bool] = False,
    accuracy: tyro.conf.FlagCreatePairsOff[bool] = False,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Compile the GPU kernels for several GPU architectures, which need not be present, and report
    registers, spills, shared memory, occupancy, widths of loads and stores, tensor-core
    instructions and asynchronous copies, and the roofline time of each op.

    Fails if a kernel violates a codegen check: no spills, shared memory within bounds, tensor cores
    in every GEMM, 128-bit loads in bandwidth-bound kernels. Nothing runs on a GPU. Compiled kernels
    are cached.

    Examples: `ingot kernels --default-configs` for the configurations that calls use, `ingot
    kernels linear --target sm_90` for one op and GPU, `ingot kernels --accuracy` for the errors of
    the kernels in Triton's interpreter.

    Args:
        names: Only these ops.
        target: Only these GPU architectures: sm_80, sm_90, sm_100, sm_120, gfx942.
        default_configs: Compile only the configuration that a call uses by default, not the whole
            tuning space.
        accuracy: Instead of compiling, run every sample in Triton's interpreter and report the
            largest errors relative to the tolerance.
        json: Print JSON instead of tables.
    """
    from ingot.kernels.triton import require_triton

    require_triton()
    from ingot.kernels.triton import report

    if accuracy:
        _check_ops(names)
        with progress("interpreting", None) as bar:
            errors = report.measure_accuracy(names, on_done=bar.advance)
        _print(report.accuracy_rows(errors), "largest error relative to the tolerance", json)
        return
    compiled, seconds = compile_kernels(names, target, default_configs)
    if json:
        print(json_format.dumps([kernel.row for kernel in compiled], indent=2))  # noqa: T201
    else:
        _print(report.kernel_rows(compiled), "", False)
        _print(report.roofline_rows(names), "roofline time of the representative call", False)
        stdout().print(report.summary(compiled, seconds), highlight=False)
    violations = report.all_violations(compiled)
    if violations:
        raise IngotError(
            f"{len(violations)} violations of the codegen checks: " + "; ".join(violations[:5]),
            hint="change the kernel or remove the configuration from its tuning space",
        )


def compile_kernels(
    names: tuple[str, ...], targets: tuple[str, ...], default_configs: bool
) -> tuple[list[CompiledKernel], float]:
    """Compile the kernels of these ops; return them and the seconds it took."""
    from ingot.kernels.triton.compiler import compile_all, compile_jobs
    from ingot.kernels.triton.target import TARGETS

    _check_ops(names)
    for target in targets:
        if target not in TARGETS:
            raise UnknownName("GPU target", target, TARGETS)
    start = time.monotonic()
    jobs = compile_jobs(names, targets or tuple(TARGETS), all_configs=not default_configs)
    with progress("compiling", len(jobs)) as bar:
        compiled = compile_all(jobs, on_done=bar.advance)
    return compiled, time.monotonic() - start


def _check_ops(names: tuple[str, ...]) -> None:
    from ingot.kernels.triton.provider import triton_ops

    for name in names:
        if name not in triton_ops():
            raise UnknownName("op with GPU kernels", name, triton_ops())


def _print(rows: list[dict[str, Any]], title: str, json: bool) -> None:
    if json:
        print(json_format.dumps(rows, indent=2))  # noqa: T201
        return
    table = new_table(rows[0] if rows else (), title=title or None)
    for row in rows:
        table.add_row(*map(str, row.values()))
    stdout().print(table)
