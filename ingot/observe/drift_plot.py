"""A plot of a comparison: growth of the error, log-probabilities, isolated error of every op."""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ingot.observe.drift import Comparison
from ingot.observe.plot import ACCENT, ALARM, INK, save, styled

RESIDUAL = {
    "attention.out": "after attention",
    "attention_residual": "after attention",
    "mlp.down": "after the MLP",
    "mlp": "after the MLP",
    "mlp_residual": "after the MLP",
}
"""Ops whose results are the residual stream; in a post-norm block the last of each kind is."""
_MAX_LABELS = 3  # outliers that are named in the plot
_COLOUR_RANGE = 1e4  # smaller errors have the darkest colour


def draw(comparison: Comparison, paths: Sequence[Path]) -> None:
    """Plot a comparison to each of the files."""
    with styled():
        from matplotlib.figure import Figure

        has_ops = bool(comparison.ops)
        size = (11, 7.5) if has_ops else (6.5, 4.5)
        figure = Figure(figsize=size, dpi=120, layout="constrained")
        title = f"{Path(comparison.model).name[:40]} compared with {comparison.other[-60:]}"
        figure.suptitle(title, fontsize=10, x=0.01, ha="left", parse_math=False)
        if has_ops:
            axes: Any = figure.subplot_mosaic(
                [["growth", "logprobs"], ["ops", "ops"]], height_ratios=[1, 1.15]
            )
            _draw_growth(axes["growth"], comparison)
            _draw_logprobs(axes["logprobs"], comparison)
            _draw_ops(figure, axes["ops"], comparison)
        else:
            _draw_logprobs(figure.add_subplot(), comparison)
        for path in paths:
            save(figure, path)


def residual_stream(comparison: Comparison) -> dict[str, dict[int, float]]:
    """Return the relative error of the residual stream of each layer after each sublayer."""
    found: dict[str, dict[int, float]] = {"after attention": {}, "after the MLP": {}}
    for op in comparison.ops:
        if op.layer is not None and op.kind in RESIDUAL:
            found[RESIDUAL[op.kind]][op.layer] = op.error
    return found


def _draw_growth(axes: Any, comparison: Comparison) -> None:
    axes.set(title="relative error of the residual stream", xlabel="layer")
    errors = residual_stream(comparison)
    for (label, values), colour, shift in zip(
        errors.items(), (ACCENT, INK), (-0.25, 0.25), strict=True
    ):
        at = [layer + shift for layer in values]
        axes.plot(at, list(values.values()), "o-", ms=3, lw=1.2, color=colour, label=label)
    positive = [v for values in errors.values() for v in values.values() if 0 < v < math.inf]
    if positive:
        axes.set_yscale("log", nonpositive="mask")
        axes.legend(loc="lower right")
    else:
        axes.text(0.5, 0.5, "bitwise equal", ha="center", transform=axes.transAxes)


def _draw_logprobs(axes: Any, comparison: Comparison) -> None:
    """Plot the difference of each next token's log-probability against that of the first model."""
    ours, theirs = np.array(comparison.logprobs), np.array(comparison.other_logprobs)
    axes.set(title="log-probability of the next token", xlabel="first model", ylabel="difference")
    axes.plot(ours, theirs - ours, "o", ms=3, alpha=0.5, color=INK, mew=0)
    for bound, style in ((0.01, ":"), (0.05, "--")):
        for sign in (-1, 1):
            axes.axhline(sign * math.log1p(bound), color=ACCENT, lw=0.8, ls=style)
    largest = max(float(np.abs(theirs - ours).max()), math.log1p(0.05))
    axes.set_ylim(-1.2 * largest, 1.2 * largest)
    axes.text(0.01, 0.02, "lines: ratio 1 % and 5 %", transform=axes.transAxes, color="#6b7280")


def _draw_ops(figure: Any, axes: Any, comparison: Comparison) -> None:
    """Show the isolated errors: a row for each op, a column for each layer."""
    from matplotlib.colors import LogNorm

    inner = [op for op in comparison.ops if op.layer is not None]
    kinds = list(dict.fromkeys(op.kind for op in inner))
    layers = 1 + max(op.layer or 0 for op in inner)
    grid = np.full((len(kinds), layers), np.nan)
    for op in inner:
        grid[kinds.index(op.kind), op.layer or 0] = op.isolated_error
    positive = grid[np.isfinite(grid) & (grid > 0)]
    low, high = (positive.min(), positive.max()) if len(positive) else (1e-3, 1.0)
    norm = LogNorm(min(max(low, high / _COLOUR_RANGE), high / 10), high)
    masked = np.ma.masked_where(~(grid > 0), grid)
    image = axes.imshow(masked, aspect="auto", norm=norm, cmap="viridis", interpolation="none")
    figure.colorbar(image, ax=axes, pad=0.01)
    axes.set(xlabel="layer", yticks=range(len(kinds)), yticklabels=kinds)
    axes.set_title("isolated relative error: each op from the same inputs; white: bitwise equal")
    axes.grid(False)
    outliers = [(op, ratio) for op, ratio in comparison.outliers if op.layer is not None]
    for number, (op, ratio) in enumerate(outliers):
        place = (op.layer, kinds.index(op.kind))
        axes.plot(*place, "s", ms=9, mfc="none", mec=ALARM, mew=1.5)
        if number < _MAX_LABELS:
            text = op.name if math.isinf(ratio) else f"{op.name}, {ratio:.0f}x"
            right = op.layer is not None and op.layer > layers / 2
            axes.annotate(
                text,
                place,
                xytext=(-10 if right else 10, 9),
                textcoords="offset points",
                ha="right" if right else "left",
                color=ALARM,
            )
