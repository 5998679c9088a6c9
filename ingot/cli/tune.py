"""`ingot tune`: autotune the kernels on this machine's GPU or CPU."""

from __future__ import annotations

import json as json_format
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ingot.cli.tables import new_table
from ingot.core.device import detect, resolve
from ingot.core.errors import IngotError, UnknownName
from ingot.core.log import logger, progress, stdout

if TYPE_CHECKING:
    from ingot.bench.cpu_tuning import CpuTuneResult
    from ingot.kernels.triton.autotune import TuneResult

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def tune(
    names: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME ...]")
    ] = (),
    device: Literal["auto", "gpu", "cpu"] = "auto",
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16",
    trials: int = 40,
    search: Literal["tpe", "random", "evolution", "grid"] = "tpe",
    export: Path | None = None,
    import_: Annotated[Path | None, tyro.conf.arg(name="import")] = None,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """Time the kernels' configurations on this machine and store the fastest, for machines with the
    same GPU or CPU. Calls use it from then on.

    On a GPU, every configuration of the named ops is timed at the shapes that `ingot kernels`
    compiles them for, and has to be accurate. On a CPU, Optuna searches thresholds, block sizes and
    prefetch distances (groups: matmul, quantized, tasks), none of which changes a bit of a result.

    Each result is stored as soon as it is found, so an interrupted run keeps what it has.

    Examples: `ingot tune` for all kernels, `ingot tune linear attention` for some on a GPU,
    `ingot tune --device cpu matmul`, `ingot tune --export tuned.json` and
    `ingot tune --import tuned.json` for the other machines of a fleet.

    Args:
        names: Only these ops (GPU) or groups (CPU).
        device: "auto" is the GPU if there is one.
        dtype: Data type of the tensors on a GPU; each has its own configurations.
        trials: Most trials of a group on a CPU.
        search: How the values of a trial are chosen on a CPU.
        export: Write what is stored to this file instead of tuning.
        import_: Add what is in this file to what is stored, instead of tuning.
        json: Print JSON instead of a table.
    """
    from ingot.kernels import tuned

    if export:
        stdout().print(f"{tuned.export(export)} configurations written to {export}")
    elif import_:
        stdout().print(f"{tuned.import_(import_)} configurations added from {import_}")
    elif device == "cpu" or (device == "auto" and not detect().gpus):
        _tune_cpu(names, trials, search, json)
    else:
        _tune_gpu(names, dtype, json)


def _tune_gpu(names: tuple[str, ...], dtype: str, json: bool) -> None:
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


def _tune_cpu(names: tuple[str, ...], trials: int, method: Any, json: bool) -> None:
    from ingot.bench import cpu_tuning
    from ingot.kernels.cpu import tuning
    from ingot.kernels.tuned import database_path

    for name in names:
        if name not in tuning.GROUPS:
            raise UnknownName("group of CPU parameters", name, tuning.GROUPS)
    if trials < 1:
        raise IngotError(
            f"trials: expected at least 1, got {trials}", hint="the default is 40 for each group"
        )
    results: list[CpuTuneResult] = []
    for group in names or tuning.GROUPS:
        bench = cpu_tuning.Bench(cpu_tuning.workloads(group))
        with progress(f"tuning {group}", trials) as bar:
            result = cpu_tuning.search(group, bench, trials=trials, method=method, done=bar.advance)
        if result.chosen:
            tuning.save(group, result.chosen, result.best.speedup)
        results.append(result)
    if json:
        print(json_format.dumps([cpu_row(each) for each in results], indent=2))  # noqa: T201
        return
    table = new_table(("group", "fastest", "speedup", "over workloads", "trials", "pruned"))
    for row in map(cpu_row, results):
        table.add_row(
            row["group"],
            ", ".join(f"{name}={value}" for name, value in row["changed"].items()) or "as it ships",
            f"{row['speedup']:.3f}x",
            f"{row['worst']:.2f}x to {row['best']:.2f}x",
            str(row["trials"]),
            str(row["pruned"]),
        )
    stdout().print(table)
    stdout().print(f"stored in {database_path()}", highlight=False, markup=False)


def cpu_row(result: CpuTuneResult) -> dict[str, Any]:
    """Return a result of the CPU as `--json` prints it; speedups are relative to the defaults."""
    from ingot.kernels.cpu import tuning

    defaults, chosen = tuning.defaults(), result.chosen or {}
    return {
        "group": result.group,
        "changed": {name: value for name, value in chosen.items() if value != defaults[name]},
        "speedup": round(result.best.speedup, 4),
        "worst": round(min(result.best.by_workload.values()), 4),
        "best": round(max(result.best.by_workload.values()), 4),
        "trials": len(result.trials),
        "pruned": result.pruned,
    }


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
    from ingot.kernels.triton.config_store import current_target
    from ingot.kernels.tuned import database_path

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
