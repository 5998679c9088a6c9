"""Draws what clients saw: how long first tokens took and the next ones, and how many came."""

# pyright: basic
from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ingot.bench.results import RunInfo
from ingot.bench.serve import RequestRecord
from ingot.serving.simulate import SLO


def draw(answers: list[RequestRecord], slo: SLO, run: RunInfo, path: Path) -> None:
    """Two shares of all by time, and the tokens of each second."""
    from matplotlib.figure import Figure

    answered = [answer for answer in answers if answer.times]
    figure = Figure(figsize=(12, 4), dpi=120, layout="constrained")
    axes: Any = figure.subplots(1, 3)
    _shares(axes[0], [a.first for a in answered], "seconds to the first token", slo.ttft)
    gaps = [np.diff(np.frombuffer(a.times)) for a in answered]
    together = np.concatenate(gaps) if gaps else []
    _shares(axes[1], together, "seconds from a token to the next", slo.tpot)
    _rates(axes[2], answered)
    figure.suptitle(f"{run.cpu} ({run.isa}), ingot {run.ingot}, {run.date[:10]}", fontsize=10)
    figure.savefig(path)


def _shares(axes: Any, values: Any, label: str, slo: float) -> None:
    if len(values):
        axes.ecdf(values, lw=1.5)
    axes.axvline(slo, color="0.5", ls="--", lw=1)
    axes.annotate("goal", (slo, 0.02), (4, 0), textcoords="offset points", color="0.4")
    axes.set(xlabel=label, ylabel="share of all", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.grid(alpha=0.2)


def _rates(axes: Any, answers: list[RequestRecord]) -> None:
    begin = min((a.sent for a in answers), default=0.0)
    times = np.concatenate([np.frombuffer(a.times) for a in answers] or [np.zeros(0)]) - begin
    weights = np.concatenate(
        [np.full(len(a.times), a.tokens / len(a.times)) for a in answers] or [np.zeros(0)]
    )
    last = float(times.max(initial=1.0))
    width = max(0.25, last / 60)
    counts, edges = np.histogram(times, np.arange(0, last + width, width), weights=weights)
    axes.stairs(counts / width, edges, lw=1.5)
    axes.set(xlabel="seconds", ylabel="tokens a second", ylim=(0, None))
    axes.grid(alpha=0.2)
