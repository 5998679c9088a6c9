"""Plots and page of `ingot plan`: where a step's time goes, and how the run would scale."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ingot.core.errors import ConfigError
from ingot.core.paths import write_atomic
from ingot.observe import page, plot
from ingot.planning.cost import PARTS
from ingot.planning.memory import GIB, MEMORY_PARTS
from ingot.planning.search import PlanEstimate, search
from ingot.workflows.plan import PlanReport

MAX_BARS = 8
SCALES = tuple(8 << k for k in range(12))
"""Numbers of GPUs of the scaling plot: 8 to 16,384."""
COLORS = {
    "matmul": "#1f5fa8",
    "attention": "#5b8fc9",
    "elementwise": "#a9c4e4",
    "tensor_parallel": "#d9622b",
    "context_parallel": "#e8935f",
    "expert_parallel": "#f0b48f",
    "fsdp": "#c2410c",
    "gradients": "#7c2d12",
    "launch": "#8b5cf6",
    "imbalance": "#9ca3af",
    "bubble": "#6b7280",
    "optimizer": "#15803d",
    "scale": "#d4d4d8",
}
NAMES = {
    "tensor_parallel": "TP communication",
    "context_parallel": "CP communication",
    "expert_parallel": "EP communication",
    "fsdp": "FSDP communication",
    "gradients": "gradient reduction",
    "launch": "kernel launches",
    "imbalance": "stage imbalance",
    "bubble": "pipeline bubble",
    "scale": "many GPUs",
}
COLUMNS = ("plan", "step, s", "range", "MFU", "tokens/s/GPU", "GiB", "communication", "bubble")


@dataclass(frozen=True)
class ScalingPoint:
    """The first choice at a number of GPUs."""

    gpus: int
    estimate: PlanEstimate


def scaling(report: PlanReport, *, is_weak: bool) -> list[ScalingPoint]:
    """Return the first choice for 8 to 16,384 GPUs, where any plan fits.

    In weak scaling, the global batch grows with the GPUs; in strong scaling, it is that of the
    report.
    """
    points = list[ScalingPoint]()
    for gpus in SCALES:
        per_gpu = report.workload.global_batch_size / report.cluster.gpus
        batch = max(1, round(per_gpu * gpus)) if is_weak else report.workload.global_batch_size
        workload = replace(report.workload, global_batch_size=batch)
        cluster = replace(report.cluster, gpus=gpus)
        try:
            calibrated = report.own_runs > 0
            found = search(workload, cluster, report.fitted, is_calibrated=calibrated)
        except ConfigError:
            continue
        points.append(ScalingPoint(gpus, found.estimates[0]))
    return points


def row(estimate: PlanEstimate) -> tuple[str, ...]:
    """Return the cells of a plan in the table, formatted."""
    step = estimate.step_s
    return (
        estimate.plan.describe(),
        f"{step:.3g}",
        f"{estimate.low:.3g}-{estimate.high:.3g}",
        f"{estimate.mfu:.0%}",
        f"{estimate.tokens_per_gpu_s:,.0f}",
        f"{estimate.memory.total / GIB:.0f}",
        f"{estimate.time.communication / step:.0%}",
        f"{(estimate.time.bubble + estimate.time.imbalance) / step:.0%}",
    )


def memory_row(estimate: PlanEstimate) -> tuple[str, ...]:
    """Return the GiB of each part of the memory, formatted."""
    return tuple(f"{getattr(estimate.memory, name) / GIB:.1f}" for name in MEMORY_PARTS)


def draw_steps(estimates: Sequence[PlanEstimate], files: Sequence[Path]) -> None:
    """Plot where the time of a step goes, one bar for each plan."""
    shown = estimates[:MAX_BARS]
    with plot.styled():
        from matplotlib.figure import Figure

        size = (11, 1.9 + 0.42 * len(shown))
        figure: Any = Figure(figsize=size, dpi=120, layout="constrained")
        axes: Any = figure.add_subplot()
        left = [0.0] * len(shown)
        for name in PARTS:
            values = [float(getattr(one.time, name)) for one in shown]
            if max(values) < 0.002 * max(one.step_s for one in shown):
                continue
            label = NAMES.get(name, name)
            axes.barh(range(len(shown)), values, left=left, color=COLORS[name], label=label)
            left = [a + b for a, b in zip(left, values, strict=True)]
        spans = [[one.step_s - one.low for one in shown], [one.high - one.step_s for one in shown]]
        style: Any = {"fmt": "none", "ecolor": "#374151", "elinewidth": 1, "capsize": 3}
        axes.errorbar(left, range(len(shown)), xerr=spans, **style)
        axes.set_yticks(range(len(shown)), [one.plan.describe() for one in shown])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set(title="predicted seconds of a step; lines: 80 % interval", xlim=(0, None))
        figure.legend(loc="outside lower center", ncols=6)
        for file in files:
            plot.save(figure, file)


def draw_scaling(report: PlanReport, files: Sequence[Path]) -> None:
    """Plot tokens per second and GPU of the first choice from 8 to 16,384 GPUs."""
    with plot.styled():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained")
        axes: Any = figure.add_subplot()
        for is_weak, label, color in (
            (True, "batch grows with the GPUs", plot.INK),
            (False, f"batch of {report.workload.global_batch_size}", plot.ACCENT),
        ):
            points = scaling(report, is_weak=is_weak)
            if not points:
                continue
            gpus = [point.gpus for point in points]
            values = [point.estimate.tokens_per_gpu_s for point in points]
            low = [v / point.estimate.interval[1] for v, point in zip(values, points, strict=True)]
            high = [v / point.estimate.interval[0] for v, point in zip(values, points, strict=True)]
            axes.fill_between(gpus, low, high, color=color, alpha=0.15, lw=0)
            axes.plot(gpus, values, "o-", ms=4, lw=1.6, color=color, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks(SCALES, [f"{n:,}" for n in SCALES])
        title = f"{report.model}: predicted tokens/s/GPU of the best plan; bands: 80 % interval"
        axes.set(title=title, xlabel="GPUs", ylim=(0, None))
        axes.legend(loc="lower left")
        for file in files:
            plot.save(figure, file)


def write_page(report: PlanReport, path: Path) -> None:
    """Write the report as one HTML page, with its figures next to it."""
    shown = report.result.estimates[:MAX_BARS]
    workload, cluster = report.workload, report.cluster
    stem = path.stem
    sections = [
        page.Section(heading="Plans", headings=COLUMNS, rows=[row(one) for one in shown]),
        page.figure(
            path.parent,
            f"{stem}-steps",
            lambda files: draw_steps(shown, files),
            alt="where the time of a step goes, for each plan",
            heading="Where the time goes",
        ),
        page.Section(
            heading="Memory of a GPU, GiB",
            headings=("plan", *MEMORY_PARTS),
            rows=[(one.plan.describe(), *memory_row(one)) for one in shown],
            numbers=True,
        ),
        page.figure(
            path.parent,
            f"{stem}-scaling",
            lambda files: draw_scaling(report, files),
            alt="predicted tokens per second and GPU from 8 to 16,384 GPUs",
            heading="Scaling",
        ),
    ]
    status = (
        f"{cluster.gpus:,} GPUs, {workload.global_batch_size:,} sequences of "
        f"{workload.seq_len:,} tokens, {workload.precision}"
    )
    text = page.render(report.model, status, sections, path=path, seconds=time.time())
    write_atomic(path, text)
