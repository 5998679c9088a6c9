"""Rows of benchmark runs, kept in CSV files that grow; and summaries of those of the ops.

Each line has the run (date, CPU, versions) and the row, so a file holds many runs of many machines
and any tool can read it. A line is written as soon as it is measured: an interrupted run keeps what
it has measured.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ingot.bench.ops import OpRow
from ingot.core import paths
from ingot.core.device import detect
from ingot.core.errors import IngotError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from ingot.bench.peaks import Peaks


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """When and on which machine rows were measured."""

    date: str
    cpu: str
    """The device that computed: a CPU and its cores, or a GPU."""
    isa: str
    """The best instruction-set tier of the CPU, or the GPU's architecture."""
    torch: str
    ingot: str

    @classmethod
    def now(cls, version: str, device: str = "cpu") -> RunInfo:
        """Describe this machine's CPU or GPU, now, with this version of ingot."""
        machine = detect()
        cpu, isa = f"{machine.cpu.name}, {machine.cpu.cores} cores", machine.cpu.isa[0]
        if device != "cpu":
            cpu, isa = machine.gpus[0].name, machine.gpus[0].capability or ""
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            cpu=cpu,
            isa=isa,
            torch=machine.torch,
            ingot=version,
        )

    def __str__(self) -> str:
        return f"{self.date}, {self.cpu} ({self.isa}), torch {self.torch}, ingot {self.ingot}"


@dataclass(frozen=True)
class Record:
    """A line of the file of the ops."""

    run: RunInfo
    row: OpRow


@dataclass(frozen=True, kw_only=True)
class FamilyMean:
    """Geometric means over the workloads of a family, of the op as it is called."""

    family: str
    workloads: int
    roofline_fraction: float | None
    vs_eager: float | None
    vs_compile: float | None


def report(rows: Iterable[DataclassInstance], machine: Peaks, run: RunInfo) -> dict[str, Any]:
    """Return a header and the rows, as `ingot bench ... --json` prints them."""
    peaks = json.loads(machine.to_json())
    return {"header": {**asdict(run), "peaks": peaks}, "rows": [asdict(row) for row in rows]}


def prepare(path: Path, kind: type[DataclassInstance] = OpRow) -> None:
    """Create the file with its header, or check that it has the columns of `kind`."""
    columns = [field.name for part in (RunInfo, kind) for field in fields(part)]
    if not path.exists():
        paths.write_atomic(path, ",".join(columns) + "\n")
    with path.open(newline="") as file:
        header = next(csv.reader(file), None)
    if header != columns:
        raise IngotError(
            f"{path}: columns must be those of this version, got {','.join(header or [])[:80]}",
            hint="move the file away, or choose another directory",
        )


def append(path: Path, run: RunInfo, rows: Iterable[DataclassInstance]) -> None:
    """Append rows to a file that is prepared for them."""
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([*asdict(run).values(), *asdict(row).values()] for row in rows)


def read(path: Path) -> list[Record]:
    """Read all lines of the file of the ops, in order."""
    with path.open(newline="") as file:
        lines = [{key: text or None for key, text in line.items()} for line in csv.DictReader(file)]
    return [
        Record(msgspec.convert(line, RunInfo), msgspec.convert(line, OpRow, strict=False))
        for line in lines
    ]


def latest(records: Sequence[Record]) -> list[Record]:
    """Return the last measurement of each workload on the machine and torch of the last record."""

    def machine(run: RunInfo) -> tuple[str, ...]:
        return run.cpu, run.isa, run.torch

    here = [r for r in records if machine(r.run) == machine(records[-1].run)]
    newest = {_workload(r.row): r.run for r in here}
    return [r for r in here if r.run == newest[_workload(r.row)]]


def called_rows(rows: Iterable[OpRow]) -> list[OpRow]:
    """Return the first row of each workload: the op as it is called."""
    return list({_workload(row): row for row in reversed(list(rows))}.values())[::-1]


def family_means(rows: Iterable[OpRow]) -> list[FamilyMean]:
    """Return the geometric means by family."""
    by_family = sorted(called_rows(rows), key=lambda row: row.family)
    return [
        _family_mean(family, list(members))
        for family, members in groupby(by_family, key=lambda row: row.family)
    ]


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values that are not None; None if there are none.

    >>> geometric_mean([2.0, None, 8.0])
    4.0
    """
    logs = [math.log2(value) for value in values if value is not None]
    return 2 ** (sum(logs) / len(logs)) if logs else None


def _family_mean(family: str, rows: list[OpRow]) -> FamilyMean:
    return FamilyMean(
        family=family,
        workloads=len(rows),
        roofline_fraction=geometric_mean(row.roofline_fraction for row in rows),
        vs_eager=geometric_mean(row.vs_eager for row in rows),
        vs_compile=geometric_mean(row.vs_compile for row in rows),
    )


def _workload(row: OpRow) -> tuple[str, str, str]:
    return row.op, row.shape, row.dtype
