"""The report of `ingot profile`: rows of its tables, and an HTML page with a plot."""

# pyright: basic
from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ingot.core.paths import write_atomic
from ingot.observe import page, plot
from ingot.observe.trace import Kind, OpTime, WindowProfile
from ingot.workflows.profile import Profile

FIGURE = "time"
KIND_HEADINGS = ("", "ms per step", "time")
OP_HEADINGS = ("op", "calls per step", "ms per step", "time", "MB allocated per step")
_PAGE_OPS, _PLOT_OPS = 40, 14
_COLORS = {
    Kind.INGOT: plot.INK,
    Kind.OTHER: "#7aa5d8",
    Kind.COPIES: "#0f766e",
    Kind.COMMUNICATION: "#7c3aed",
    Kind.DATA: plot.ALARM,
    Kind.REQUESTS: "#9ca3af",
    Kind.CALLS: "#f2b48f",
    Kind.PYTHON: plot.ACCENT,
}


def kind_rows(window: WindowProfile) -> list[tuple[str, ...]]:
    """Return the time of each kind, the longest first."""
    steps = max(1, window.steps)
    return [
        (kind.value, f"{seconds / steps * 1e3:.2f}", f"{window.share(kind):.1%}")
        for kind, seconds in sorted(window.kinds.items(), key=lambda item: -item[1])
    ]


def op_rows(window: WindowProfile, most: int) -> list[tuple[str, ...]]:
    """Return what is known about the slowest ops."""
    steps = max(1, window.steps)

    def row(op: OpTime) -> tuple[str, ...]:
        return (
            op.name,
            f"{op.count / steps:.1f}",
            f"{op.seconds / steps * 1e3:.3f}",
            f"{op.seconds / window.seconds:.1%}",
            f"{op.allocated / steps / 1e6:.2f}",
        )

    return [row(op) for op in window.ops[:most]]


def write_page(profile: Profile, directory: Path) -> Path:
    """Write `report.html` and its plot to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    window = profile.window
    sections = [
        page.Section(
            heading="What to do",
            rows=[(suggestion,) for suggestion in profile.suggestions],
            headings=("suggestion",),
            note="" if profile.suggestions else "Nothing that was tried made it faster.",
        ),
        page.figure(
            directory,
            FIGURE,
            lambda files: draw(window, files),
            alt="Bars of the time of each kind and of the slowest ops",
            heading="Where the time goes",
        ),
        page.Section(headings=KIND_HEADINGS, rows=kind_rows(window), numbers=True),
        page.Section(
            heading="Ops", headings=OP_HEADINGS, rows=op_rows(window, _PAGE_OPS), numbers=True
        ),
        page.Section(
            heading="Ranks",
            headings=("rank", *(kind.value for kind in Kind)),
            rows=_rank_rows(profile) if len(profile.shares) > 1 else (),
            numbers=True,
        ),
        page.Section(
            heading="What was tried",
            headings=("change of the recipe", "speed"),
            rows=[(trial.text, f"{trial.speedup:.2f}x") for trial in profile.trials],
            numbers=True,
        ),
        page.Section(
            heading="Trace",
            note=f"{profile.trace.name} shows each call on a time line: open it in "
            "https://ui.perfetto.dev, which reads it in the browser and sends it nowhere.",
        ),
    ]
    text = page.render(
        profile.name,
        profile.sentence,
        sections,
        path=directory,
        seconds=time.time(),
        tiles=tiles(profile),
    )
    write_atomic(directory / page.NAME, text)
    return directory / page.NAME


def tiles(profile: Profile) -> list[tuple[str, str]]:
    """Return names and values of the most important numbers."""
    window, found = profile.window, []
    if profile.step_seconds is not None and profile.rows_per_second is not None:
        found += [
            ("step", f"{profile.step_seconds * 1e3:.2f} ms"),
            ("tokens or samples per second", f"{profile.rows_per_second:,.0f}"),
        ]
    steps = f"{window.seconds / max(1, window.steps) * 1e3:.2f} ms"
    return [*found, ("step, with the profiler", steps), ("steps recorded", str(window.steps))]


def _rank_rows(profile: Profile) -> list[tuple[str, ...]]:
    return [
        (str(rank), *(f"{share:.1%}" for share in shares))
        for rank, shares in enumerate(profile.shares)
    ]


def draw(window: WindowProfile, paths: Sequence[Path]) -> None:
    """Plot the time of each kind as one bar, and that of the slowest ops below."""
    with plot.styled():
        from matplotlib.figure import Figure

        ops = window.ops[:_PLOT_OPS]
        figure = Figure(figsize=(9, 1.6 + 0.26 * len(ops)), dpi=120, layout="constrained")
        axes: Any = figure.subplots(2, 1, height_ratios=(1, max(1, len(ops)) / 2.5))
        left = 0.0
        for kind in Kind:
            if share := 100 * window.share(kind):
                axes[0].barh(0, share, left=left, color=_COLORS[kind], label=kind.value)
                left += share
        axes[0].set(xlim=(0, 100), yticks=())
        axes[0].legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
        scale = 1e3 / max(1, window.steps)
        axes[1].barh(
            [op.name for op in ops],
            [op.seconds * scale for op in ops],
            color=[_COLORS[op.kind] for op in ops],
        )
        axes[1].invert_yaxis()
        axes[0].set_xlabel("% of the time")
        axes[1].set_xlabel("ms per step")
        for path in paths:
            plot.save(figure, path)
