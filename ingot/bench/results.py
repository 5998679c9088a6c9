"""Rows of a run, kept: one CSV a kind that grows, and what is read out of the one of the ops.

Each line has the run (date, CPU, versions) and the row, so a file holds many runs of many
machines and can be read by anything. A line is written as soon as it is measured: a run that is
broken off leaves what it has.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ingot.bench.ops import Row
from ingot.core import paths
from ingot.core.device import detect
from ingot.core.errors import IngotError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, kw_only=True)
class Run:
    """When and on what rows were measured."""

    date: str
    cpu: str
    """What computed: a CPU and its cores, or a GPU."""
    isa: str
    """The CPU's best tier, or the GPU's architecture."""
    torch: str
    ingot: str

    @classmethod
    def now(cls, version: str, place: str = "cpu") -> Run:
        """This machine's CPU or GPU, now, with this version of ingot."""
        device = detect()
        cpu, isa = f"{device.cpu.name}, {device.cpu.cores} cores", device.cpu.isa[0]
        if place != "cpu":
            cpu, isa = device.gpus[0].name, device.gpus[0].capability or ""
        return cls(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            cpu=cpu,
            isa=isa,
            torch=device.torch,
            ingot=version,
        )


@dataclass(frozen=True)
class Record:
    """A line of the file."""

    run: Run
    row: Row


@dataclass(frozen=True, kw_only=True)
class Mean:
    """Geometric means over the workloads of a family, of the op as it is called."""

    family: str
    workloads: int
    share_of_limit: float | None
    vs_aten: float | None
    vs_compile: float | None


def prepare(path: Path, kind: type[DataclassInstance] = Row) -> None:
    """Write the heading of a new file of rows of a kind; refuse one that has another."""
    columns = [field.name for part in (Run, kind) for field in fields(part)]
    if not path.exists():
        paths.write_atomic(path, ",".join(columns) + "\n")
    with path.open(newline="") as file:
        if next(csv.reader(file), None) != columns:
            raise IngotError(
                f"{path} has other columns than this version writes",
                hint="move it away, or choose another directory",
            )


def append(path: Path, run: Run, rows: Iterable[DataclassInstance]) -> None:
    """Add the rows to a file that is prepared for their kind."""
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([*asdict(run).values(), *asdict(row).values()] for row in rows)


def read(path: Path) -> list[Record]:
    """All of a file, in its order."""
    with path.open(newline="") as file:
        lines = [{key: text or None for key, text in line.items()} for line in csv.DictReader(file)]
    return [
        Record(msgspec.convert(line, Run), msgspec.convert(line, Row, strict=False))
        for line in lines
    ]


def latest(records: Sequence[Record]) -> list[Record]:
    """The last measurement of each workload, on the machine and torch of the last record."""

    def machine(run: Run) -> tuple[str, ...]:
        return run.cpu, run.isa, run.torch

    here = [r for r in records if machine(r.run) == machine(records[-1].run)]
    newest = {_workload(r.row): r.run for r in here}
    return [r for r in here if r.run == newest[_workload(r.row)]]


def served(rows: Iterable[Row]) -> list[Row]:
    """The first row of each workload: the op as it is called."""
    return list({_workload(row): row for row in reversed(list(rows))}.values())[::-1]


def means(rows: Iterable[Row]) -> list[Mean]:
    """Geometric means by family."""
    by_family = sorted(served(rows), key=lambda row: row.family)
    return [
        _mean(family, list(members))
        for family, members in groupby(by_family, key=lambda row: row.family)
    ]


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None if there are none.

    >>> geometric_mean([2.0, None, 8.0])
    4.0
    """
    logs = [math.log2(value) for value in values if value is not None]
    return 2 ** (sum(logs) / len(logs)) if logs else None


def _mean(family: str, rows: list[Row]) -> Mean:
    return Mean(
        family=family,
        workloads=len(rows),
        share_of_limit=geometric_mean(row.share_of_limit for row in rows),
        vs_aten=geometric_mean(row.vs_aten for row in rows),
        vs_compile=geometric_mean(row.vs_compile for row in rows),
    )


def _workload(row: Row) -> tuple[str, str, str]:
    return row.op, row.shape, row.dtype
