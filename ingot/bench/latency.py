"""Plots what clients saw: TTFT, inter-token latency and throughput."""

# pyright: basic
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ingot.bench.results import RunInfo
from ingot.bench.serve import RequestRecord
from ingot.serving.simulate import SLO


def draw(records: list[RequestRecord], slo: SLO, run: RunInfo, path: Path) -> None:
    """Draw the cumulative distributions of both latencies, and the tokens per second over time."""
    from matplotlib.figure import Figure

    answered = [record for record in records if record.times]
    figure = Figure(figsize=(12, 4), dpi=120, layout="constrained")
    axes: Any = figure.subplots(1, 3)
    _cumulative(axes[0], [r.ttft for r in answered], "time to first token, s", slo.ttft)
    gaps = [np.diff(np.frombuffer(r.times)) for r in answered]
    all_gaps = np.concatenate(gaps) if gaps else []
    _cumulative(axes[1], all_gaps, "inter-token latency, s", slo.tpot)
    _throughput(axes[2], answered)
    figure.suptitle(f"{run.cpu} ({run.isa}), ingot {run.ingot}, {run.date[:10]}", fontsize=10)
    figure.savefig(path)


def _cumulative(axes: Any, values: Any, label: str, slo: float) -> None:
    if len(values):
        axes.ecdf(values, lw=1.5)
    axes.axvline(slo, color="0.5", ls="--", lw=1)
    axes.annotate("SLO", (slo, 0.02), (4, 0), textcoords="offset points", color="0.4")
    axes.set(xlabel=label, ylabel="fraction of requests", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.2)


def _throughput(axes: Any, records: list[RequestRecord]) -> None:
    begin = min((r.sent for r in records), default=0.0)
    times = np.concatenate([np.frombuffer(r.times) for r in records] or [np.zeros(0)]) - begin
    weights = np.concatenate(
        [np.full(len(r.times), r.tokens / len(r.times)) for r in records] or [np.zeros(0)]
    )
    last = float(times.max(initial=1.0))
    width = max(0.25, last / 60)
    counts, edges = np.histogram(times, np.arange(0, last + width, width), weights=weights)
    axes.stairs(counts / width, edges, lw=1.5)
    axes.set(xlabel="time, s", ylabel="tokens/s", ylim=(0, None))
    axes.grid(alpha=0.2)
