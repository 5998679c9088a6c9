"""Draws the roofline plot of a run (Williams et al. 2009).

The x axis is the arithmetic intensity of an op: FLOPs per byte. Memory bandwidth bounds the speed
by the sloping roof, the matmul peaks by the flat ones; the peaks are those of `ingot doctor`. An op
without FLOPs (a copy of rows) is shown at the left edge, at the height of its bandwidth there.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

from ingot.bench.ops import OpRow
from ingot.bench.peaks import Peaks
from ingot.bench.results import RunInfo, called_rows

Box: TypeAlias = tuple[float, float, float, float]
"""Left, bottom, right and top."""

_FONT = 7
# Filled circles, hollow circles, crosses; other implementations are left out.
_OURS = ("cpu", "triton")
_MARKERS = {"cpu": "o", "triton": "o", "aten": "o", "reference": "x"}


def draw(rows: Iterable[OpRow], machine: Peaks, run: RunInfo, path: Path) -> None:
    """Draw ingot's kernels, PyTorch's functions, and the reference where it is dispatched to."""
    from matplotlib.figure import Figure

    rows = list(rows)
    first = set(called_rows(rows))
    shown = [
        r for r in rows if r.provider in (*_OURS, "aten") or (r in first and r.provider in _MARKERS)
    ]
    figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
    axes: Any = figure.add_subplot(xscale="log", yscale="log")
    edge = 0.5 * min((i for row in shown if (i := intensity(row))), default=0.1)
    points = {row: point_of(row, edge) for row in shown}
    _draw_roofs(axes, machine, edge, max((x for x, _ in points.values()), default=1.0) * 4)
    colours = _colours(shown)
    for row, (x, y) in points.items():
        colour = colours[row.family]
        filling = colour if row.provider in _OURS else "none"
        marker = _MARKERS[row.provider]
        axes.plot(x, y, marker, ms=6, mfc=filling, mec=colour, mew=1.2, alpha=0.85)
    _draw_legend(axes, colours)
    axes.set(xlabel="FLOP / byte", ylabel="GFLOPS")
    axes.set_title(f"{run.cpu} ({run.isa}), torch {run.torch}, {run.date[:10]}", fontsize=10)
    axes.grid(alpha=0.2)
    _draw_labels(axes, points, colours)
    figure.savefig(path)


def intensity(row: OpRow) -> float:
    """Arithmetic intensity: FLOPs per byte."""
    return row.gflops / row.gbs


def point_of(row: OpRow, edge: float) -> tuple[float, float]:
    """Return the coordinates of a row; `edge` is the x of rows without FLOPs."""
    return (intensity(row), row.gflops) if row.gflops else (edge, row.gbs * edge)


def free_box(x: float, y: float, width: float, height: float, taken: Iterable[Box]) -> Box:
    """Return the box of this size nearest to (x, y) that overlaps none of those taken.

    >>> free_box(0, 0, width=10, height=4, taken=[(-3, -3, 3, 3)])
    (4.0, 0.0, 14.0, 4.0)
    """
    taken = list(taken)
    box = (x, y, x + width, y + height)
    for distance, step in product(range(4, 400, 4), range(16)):
        angle = step * math.pi / 8
        dx, dy = distance * math.cos(angle), distance * math.sin(angle)
        left = x + dx - (width if dx < -1 else 0)
        bottom = y + dy - (height if dy < -1 else 0)
        box = (left, bottom, left + width, bottom + height)
        if not any(overlap(box, other) for other in taken):
            break
    return box


def overlap(one: Box, other: Box) -> bool:
    """Return whether two boxes overlap.

    >>> overlap((0, 0, 2, 2), (1, 1, 3, 3)), overlap((0, 0, 2, 2), (2, 0, 3, 3))
    (True, False)
    """
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _draw_roofs(axes: Any, machine: Peaks, left: float, right: float) -> None:
    bandwidth = machine.read_bandwidth.value
    compute = {name: peak.value for name, peak in machine.matmul.items() if peak and name != "int8"}
    top = max(compute.values(), default=bandwidth * right)
    ridge = top / bandwidth
    right = max(right, ridge * 4)
    axes.plot((left * 0.7, ridge), (left * 0.7 * bandwidth, top), "k-", lw=1.5)
    axes.annotate(
        f"memory {bandwidth:.1f} GB/s",
        (ridge / 2, top / 2),
        (-6, 6),
        textcoords="offset points",
        ha="right",
    )
    for dtype, peak in compute.items():
        axes.plot((peak / bandwidth, right), (peak, peak), "k-", lw=1.5)
        axes.annotate(
            f"{dtype} matmul {peak:,.0f} GFLOPS",
            (right, peak),
            (0, 4),
            textcoords="offset points",
            ha="right",
        )


def _colours(rows: list[OpRow]) -> dict[str, Any]:
    from matplotlib import colormaps

    families = sorted({row.family for row in rows})
    return {family: colormaps["tab10"](index % 10) for index, family in enumerate(families)}


def _draw_labels(
    axes: Any, points: dict[OpRow, tuple[float, float]], colours: dict[str, Any]
) -> None:
    """Write the name of each op where there is space, with a line to its fastest row."""
    figure = axes.figure
    figure.draw_without_rendering()  # fixes the scales
    point = figure.dpi / 72  # in pixels, like all coordinates below
    pixels = {row: axes.transData.transform(at) for row, at in points.items()}
    taken = [
        (x - 4 * point, y - 4 * point, x + 4 * point, y + 4 * point) for x, y in pixels.values()
    ]
    # The last row of each op, sorted by height, is its fastest.
    named = {row.op: row for row in sorted(points, key=lambda row: points[row][1])}
    for row in sorted(named.values(), key=lambda row: tuple(pixels[row])):
        x, y = pixels[row]
        size = 0.58 * _FONT * point * len(row.op), 1.25 * _FONT * point
        box = free_box(x, y, *size, taken)
        taken.append(box)
        axes.annotate(
            row.op,
            points[row],
            ((box[0] - x) / point, (box[1] - y) / point),
            textcoords="offset points",
            fontsize=_FONT,
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": colours[row.family]},
        )


def _draw_legend(axes: Any, colours: dict[str, Any]) -> None:
    from matplotlib.lines import Line2D

    def marker(colour: Any, filling: Any, label: str, shape: str = "o") -> Line2D:
        return Line2D([], [], ls="", marker=shape, mec=colour, mfc=filling, label=label)

    handles = [marker(colour, colour, family) for family, colour in colours.items()]
    handles += [marker("k", "k", "ingot"), marker("k", "none", "PyTorch (aten)")]
    handles.append(marker("k", "k", "reference", shape="x"))
    axes.legend(handles=handles, loc="lower right", fontsize=8, ncols=2)
