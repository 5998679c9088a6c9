"""`ingot tune`: the fastest configurations of GPU kernels, found on the GPU."""

from __future__ import annotations

import json as json_format
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ingot.core.device import resolve
from ingot.core.errors import IngotError, UnknownName
from ingot.core.log import logger, progress, stdout

if TYPE_CHECKING:
    from ingot.kernels.triton.autotune import TuneResult

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def tune(
    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[OP ...]")] = (),
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Time every configuration of the GPU kernels on this GPU, at the shapes that `ingot kernels`
    compiles them for, and keep the fastest whose numbers are right. From then on calls of that
    kind get it, on GPUs of that name.

    What is found is kept as it is found: broken off, it keeps what it has.

    Examples: `ingot tune` for all ops, `ingot tune linear attention` for some, `ingot tune --json`
    for machines.

    Args:
        names: Only these ops.
        dtype: Of the tensors: each has configurations of its own.
        json: Print JSON instead of a table.
    """
    from ingot.kernels.triton import GPU, interpreting, require_triton

    resolve(GPU)
    require_triton()
    if interpreting():
        raise IngotError("TRITON_INTERPRET is set: nothing runs on the GPU", hint="unset it")
    results = _tuned(names, dtype, GPU)
    if json:
        print(json_format.dumps([as_row(result) for result in results], indent=2))  # noqa: T201
    else:
        _print_table(results)


def _tuned(names: tuple[str, ...], dtype: str, device: str) -> list[TuneResult]:
    import torch

    from ingot.kernels.triton import autotune
    from ingot.kernels.triton.provider import triton_ops

    for name in names:
        if name not in triton_ops():
            raise UnknownName("op with GPU kernels", name, triton_ops())
    wanted = autotune.tasks(names, getattr(torch, _DTYPES[dtype]))
    results: list[TuneResult] = []
    with progress("tuning", len(wanted)) as bar:
        for task in wanted:
            bar.describe(task.name)
            results.append(autotune.tune(task, autotune.time_on_gpu, device))
            for reason in results[-1].wrong:
                logger(__name__).warning("%s does not take %s", task.name, reason)
            bar.advance()
    return results


def as_row(result: TuneResult) -> dict[str, Any]:
    """A result as `--json` prints it; times in microseconds, None where there is none."""

    def microseconds(seconds: float) -> float | None:
        return None if math.isnan(seconds) else round(seconds * 1e6, 2)

    return {
        "kernel": result.name,
        "config": result.config and str(result.config),
        "us": microseconds(result.seconds),
        "before": str(result.before),
        "before_us": microseconds(result.before_seconds),
        "tried": result.tried,
        "wrong": list(result.wrong),
    }


def _print_table(results: list[TuneResult]) -> None:
    from rich import box
    from rich.table import Table

    from ingot.kernels.triton.config_store import current_target, database_path

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("kernel", "fastest", "us", "before", "us", "faster", "tried", "wrong"):
        table.add_column(heading, no_wrap=True)
    for result in results:
        row = as_row(result)
        faster = result.before_seconds / result.seconds
        table.add_row(
            row["kernel"],
            row["config"] or "none is right",
            str(row["us"] or "-"),
            row["before"],
            str(row["before_us"] or "-"),
            "-" if math.isnan(faster) else f"{faster:.2f}x",
            str(row["tried"]),
            str(len(row["wrong"])),
        )
    stdout().print(table)
    stdout().print(
        f"kept for {current_target()[1]} in {database_path()}", highlight=False, markup=False
    )
