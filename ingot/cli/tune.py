"""`ingot tune`: autotune the GPU kernels on this machine's GPU."""

from __future__ import annotations

import json as json_format
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ingot.cli.tables import new_table
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
    compiles them for, and store the fastest accurate one. Calls on GPUs of the same name use it
    from then on.

    Each result is stored as soon as it is found, so an interrupted run keeps what it has.

    Examples: `ingot tune` for all ops, `ingot tune linear attention` for some, `ingot tune --json`
    for JSON.

    Args:
        names: Only these ops.
        dtype: Data type of the tensors; each has its own configurations.
        json: Print JSON instead of a table.
    """
    from ingot.kernels.triton import GPU, interpreting, require_triton

    resolve(GPU)
    require_triton()
    if interpreting():
        raise IngotError(
            "TRITON_INTERPRET is set, so kernels do not run on the GPU",
            hint="unset TRITON_INTERPRET",
        )
    results = _tune_all(names, dtype, GPU)
    if json:
        print(json_format.dumps([as_row(result) for result in results], indent=2))  # noqa: T201
    else:
        _print_table(results)


def _tune_all(names: tuple[str, ...], dtype: str, device: str) -> list[TuneResult]:
    import torch

    from ingot.kernels.triton import autotune
    from ingot.kernels.triton.provider import triton_ops

    for name in names:
        if name not in triton_ops():
            raise UnknownName("op with GPU kernels", name, triton_ops())
    tasks = autotune.tuning_tasks(names, getattr(torch, _DTYPES[dtype]))
    results: list[TuneResult] = []
    with progress("tuning", len(tasks)) as bar:
        for task in tasks:
            bar.describe(task.name)
            results.append(autotune.tune(task, autotune.time_on_gpu, device))
            for reason in results[-1].rejected:
                logger(__name__).warning("%s: rejected %s", task.name, reason)
            bar.advance()
    return results


def as_row(result: TuneResult) -> dict[str, Any]:
    """Return a result as `--json` prints it; times in microseconds, None if not measured."""

    def microseconds(seconds: float) -> float | None:
        return None if math.isnan(seconds) else round(seconds * 1e6, 2)

    return {
        "kernel": result.name,
        "config": result.config and str(result.config),
        "us": microseconds(result.seconds),
        "previous_config": str(result.previous),
        "previous_us": microseconds(result.previous_seconds),
        "num_tried": result.num_tried,
        "rejected": list(result.rejected),
    }


def _print_table(results: list[TuneResult]) -> None:
    from ingot.kernels.triton.config_store import current_target, database_path

    headings = "kernel", "fastest", "us", "previous", "us", "speedup", "tried", "rejected"
    table = new_table(headings)
    for result in results:
        row = as_row(result)
        speedup = result.previous_seconds / result.seconds
        table.add_row(
            row["kernel"],
            row["config"] or "none accurate",
            str(row["us"] or "-"),
            row["previous_config"],
            str(row["previous_us"] or "-"),
            "-" if math.isnan(speedup) else f"{speedup:.2f}x",
            str(row["num_tried"]),
            str(len(row["rejected"])),
        )
    stdout().print(table)
    device = current_target()[1]
    stdout().print(f"stored for {device} in {database_path()}", highlight=False, markup=False)
