"""Published training runs: reading the table that the constants are fitted to.

`benchmarks/plan/published_runs.csv` has one row for each run with its source, cluster, model, plan
and step time; `sources.md` next to it names the sources. A row that cannot be used has its reason
in the column `excluded`. What had to be assumed or corrected is in `assumed` and `fix`.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingot.core.errors import DataError
from ingot.planning.hardware import Cluster, find_accelerator
from ingot.planning.plan import ParallelPlan, Software
from ingot.planning.workload import ModelShape, TrainingWorkload

_SHAPE = (
    *("layers", "dim", "heads", "kv_heads", "head_dim", "v_head_dim", "attention_params"),
    *("ffn_dim", "vocab_size", "experts", "top_k", "expert_dim", "shared_dim", "dense_layers"),
)
_DEGREES = ("dp", "fsdp", "tp", "pp", "vp", "cp", "ep", "micro_batch_size")
_FLAGS = ("eager", "sequence_parallel", "regather", "tp_overlap", "dp_overlap", "graphs")
REQUIRED = (
    *("gpu", "gpus", "layers", "dim", "heads", "kv_heads", "head_dim", "ffn_dim", "vocab_size"),
    *("seq_len", "global_batch_size", "step_s"),
)
"""Columns that a table of runs must have; the others have defaults."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A training run with its measured step time."""

    id: str
    source: str
    release: str
    """Release of the software, where the source has several."""
    gpu: str
    model: str
    cluster: Cluster
    workload: TrainingWorkload
    plan: ParallelPlan
    step_s: float
    memory_gib: float | None = None
    """Measured peak of memory per GPU."""

    @property
    def is_moe(self) -> bool:
        """Whether the model has experts."""
        return self.workload.model.experts > 0

    @property
    def tokens_per_gpu_s(self) -> float:
        """Measured throughput of one GPU."""
        return self.workload.tokens_per_step / self.step_s / self.plan.gpus


def read_runs(path: Path) -> list[MeasuredRun]:
    """Read the runs of a table that are not excluded."""
    return [parse_run(row, f"{path}:{line}") for line, row in _rows(path) if not row["excluded"]]


def read_excluded(path: Path) -> dict[str, str]:
    """Read the ids of the excluded rows and the reasons."""
    return {row["id"]: row["excluded"] for _, row in _rows(path) if row["excluded"]}


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            missing = set(REQUIRED) - set(reader.fieldnames or ())
            if missing:
                raise DataError(
                    f"{path}: columns are missing: {', '.join(sorted(missing))}",
                    hint="docs/plan.md lists the columns of a table of runs",
                )
            for line, row in enumerate(reader, 2):
                yield line, {"excluded": "", **row}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: cannot be read: {error}", hint="name a CSV file") from error


def parse_run(row: Mapping[str, Any], where: str) -> MeasuredRun:
    """Build a run from the columns of a row; `where` is named in errors.

    >>> run = parse_run({"gpu": "h100", "gpus": 8, "layers": 2, "dim": 64, "heads": 4,
    ...                  "kv_heads": 4, "head_dim": 16, "ffn_dim": 256, "vocab_size": 512,
    ...                  "seq_len": 128, "global_batch_size": 8, "dp": 8, "step_s": 0.5}, "here")
    >>> run.tokens_per_gpu_s
    256.0
    """
    try:
        run = _parse(row)
    except (KeyError, ValueError, TypeError) as error:
        raise DataError(
            f"{where}: not a run: {type(error).__name__} {error}"[:300],
            hint=f"give numbers for {', '.join(REQUIRED)}",
        ) from error
    if run.plan.gpus != run.cluster.gpus:
        raise DataError(
            f"{where}: dp x fsdp x tp x pp x cp must be {run.cluster.gpus} GPUs, got "
            f"{run.plan.gpus}",
            hint="correct the degrees",
        )
    return run


def _parse(row: Mapping[str, Any]) -> MeasuredRun:
    def number(name: str, default: float) -> float:
        value = row.get(name)
        return default if value in ("", None) else float(value)

    shape: dict[str, Any] = {name: int(number(name, 0)) for name in _SHAPE}
    defaults = Software()
    flags = {name: bool(number(name, float(getattr(defaults, name)))) for name in _FLAGS}
    accelerator = find_accelerator(str(row["gpu"]))
    cluster = Cluster(
        accelerator=accelerator, gpus=int(row["gpus"]), nic_gb_s=number("nic_gb_s", 0.0)
    )
    step_s = float(row["step_s"])
    if not step_s > 0:
        raise ValueError(f"step_s must be above 0, got {step_s}")
    zero: Any = int(number("zero", 0))
    attention: Any = row.get("attention") or "fused"
    recompute: Any = row.get("recompute") or "none"
    precision: Any = row.get("precision") or "bf16"
    model = ModelShape(**shape, gated=bool(number("gated", 1)), window=number("window", 1.0))
    return MeasuredRun(
        id=str(row.get("id") or ""),
        source=str(row.get("source") or ""),
        release=str(row.get("release") or ""),
        gpu=str(row["gpu"]),
        model=str(row.get("model") or ""),
        cluster=cluster,
        workload=TrainingWorkload(
            model=model,
            seq_len=int(row["seq_len"]),
            global_batch_size=int(row["global_batch_size"]),
            precision=precision,
        ),
        plan=ParallelPlan(
            **{name: int(number(name, 1)) for name in _DEGREES},
            recompute=recompute,
            software=Software(attention=attention, zero=zero, **flags),
        ),
        step_s=step_s,
        memory_gib=number("memory_gib", 0.0) or None,
    )


@dataclass(frozen=True, kw_only=True)
class ActivationMemory:
    """Memory of states and activations that a paper reports for a published run."""

    run: MeasuredRun
    recompute: str
    states_gib: float
    activations_gib: float


def read_activation_memory(path: Path, runs: Sequence[MeasuredRun]) -> list[ActivationMemory]:
    """Read the table of memory by part, whose rows refer to runs by their id."""
    by_id = {run.id: run for run in runs}
    with path.open(newline="") as file:
        return [
            ActivationMemory(
                run=by_id[row["id"]],
                recompute=row["recompute"],
                states_gib=float(row["states_gib"]),
                activations_gib=float(row["activations_gib"]),
            )
            for row in csv.DictReader(file)
        ]
