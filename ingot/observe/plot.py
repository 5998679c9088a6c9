"""Plots of the curves of a run, comparisons of several runs, and values by layer, as PNG or SVG.

A plot shows the running mean of a curve on top of its raw values, which are fainter. Of long runs
the minimum and the maximum of each of 400 bins are shown. A scale is logarithmic if the values
differ by more than a factor of 50.
"""

# pyright: basic
from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ingot.core.errors import IngotError
from ingot.core.paths import atomic_file
from ingot.observe.history import Curve, RunHistory

MAX_BINS = 400
SUFFIXES = (".png", ".svg")
_SPAN = 50.0
_REWARDS = ("rewards/accuracies", "rewards/margins")
_MAX_LEGEND = 20  # more do not fit into the figure
INK, ACCENT, ALARM = "#1f5fa8", "#d9622b", "#b91c1c"
FORECAST = "#4d7c0f"
_STYLE = {
    "axes.edgecolor": "#9ca3af",
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def available() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check(path: Path) -> None:
    """Raise an error if a plot could not be written to this path, before anything is computed."""
    if not available():
        raise IngotError(
            "plots need matplotlib, which is not installed", hint="pip install 'ingot[plot]'"
        )
    if path.suffix not in SUFFIXES:
        raise IngotError(
            f"{path}: the suffix must be one of {', '.join(SUFFIXES)}, got '{path.suffix}'",
            hint=f"name a {SUFFIXES[0]} or {SUFFIXES[1]} file",
        )
    if not path.absolute().parent.is_dir():
        raise IngotError(f"{path.parent}: no such directory", hint="create it first")


def draw(run: RunHistory, paths: Sequence[Path]) -> None:
    """Plot loss, learning rate, gradient norm and throughput of a run to each of the files, and
    the accuracies and margins of rewards if it has them."""
    with styled():
        from matplotlib.figure import Figure

        rewards = [name for name in _REWARDS if name in run.objective_metrics()]
        rows = 3 if rewards else 2
        figure = Figure(figsize=(11, 3.25 * rows), dpi=120, layout="constrained")
        axes: Any = figure.subplots(rows, 2)
        _draw_with_validation(axes[0, 0], run, "loss")
        _draw_forecasts(axes[0, 0], run)
        for panel, name in zip(axes[-1], rewards, strict=False):
            _draw_with_validation(panel, run, name)
        _draw_curve(axes[0, 1], run.curve("grad_norm"), "gradient norm, before clipping")
        lr = run.curve("lr")
        axes[1, 0].plot(lr.steps, lr.values, color=INK, lw=1.6)
        axes[1, 0].set(title="learning rate", ylim=(0, None))
        _draw_curve(axes[1, 1], run.rates(), f"{run.unit}/s")
        if axes[1, 1].get_yscale() == "linear":
            axes[1, 1].set_ylim(bottom=0)
        for panel in axes.flat:
            panel.set_xlabel("step")
            panel.set_xlim(0, max(run.step, 1))
            _mark(panel, run.skipped_steps())
        for path in paths:
            save(figure, path)


def compare(runs: Sequence[RunHistory], path: Path) -> None:
    """Plot the losses of several runs, numbered from 1 in the given order."""
    with styled():
        from matplotlib import colormaps
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 6), dpi=120, layout="constrained")
        axes: Any = figure.add_subplot()
        palette = colormaps["tab10"].colors  # pyright: ignore[reportAttributeAccessIssue]
        handles: list[Any] = []
        for number, run in enumerate(runs):
            colour = palette[number % len(palette)]
            style = ("-", "--", ":", "-.")[number // len(palette) % 4]
            loss = run.curve("loss")
            if len(loss) > 1:
                _draw_range(axes, loss, colour, 0.12)
            line = smooth(loss)
            handles += axes.plot(line.steps, line.values, style, color=colour, lw=1.6)
            validation = run.curve("validation_loss")
            axes.plot(validation.steps, validation.values, "o", ms=4, mfc="white", mec=colour)
        _scale(axes, [run.curve("loss") for run in runs])
        names = [f"{number}  {run.directory.name[:60]}" for number, run in enumerate(runs, 1)]
        legend = axes.legend(handles[:_MAX_LEGEND], names[:_MAX_LEGEND], loc="upper right")
        for text in legend.get_texts():
            text.set_parse_math(False)  # names are not formulas
        axes.set(xlabel="step", ylabel="loss", title="loss; circles: validation")
        save(figure, path)


def draw_layers(curves: Mapping[str, Curve], title: str, paths: Sequence[Path]) -> None:
    """Plot values by layer to each of the files: one curve for each kind of layer."""
    with styled():
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        figure = Figure(figsize=(11, 4.2), dpi=120, layout="constrained")
        axes: Any = figure.add_subplot()
        for name, curve in curves.items():
            axes.plot(curve.steps, curve.values, "o-", ms=4, lw=1.4, label=name)
        _scale(axes, list(curves.values()))
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
        axes.set(title=title, xlabel="layer")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.margins(x=0.02)
        # On the line of the title.
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, borderaxespad=0.2)
        for path in paths:
            save(figure, path)


def bin_curve(curve: Curve, max_bins: int = MAX_BINS) -> tuple[Curve, Curve, Curve]:
    """Return mean, minimum and maximum of each bin; every point is a bin if there are few.

    All bins but the last have the same size: a bin of one point would be a gap in a band.

    >>> curve = Curve(np.arange(1, 5), np.array([1.0, 3.0, 5.0, 9.0]))
    >>> [c.values.tolist() for c in bin_curve(curve, max_bins=2)]
    [[2.0, 7.0], [1.0, 5.0], [3.0, 9.0]]
    """
    size = max(1, -(-len(curve) // max_bins))
    bins = [np.arange(len(curve))[at : at + size] for at in range(0, len(curve), size)]
    steps = np.array([curve.steps[p].mean() for p in bins])
    values = [curve.values[p] for p in bins]
    return tuple(Curve(steps, np.array([f(v) for v in values])) for f in (np.mean, np.min, np.max))  # pyright: ignore


def smooth(curve: Curve) -> Curve:
    """Return the running mean over 2% of the curve, of at most 400 points; its ends are unchanged.

    >>> smooth(Curve(np.arange(1, 4), np.array([1.0, 2.0, 4.0]))).values.tolist()
    [1.0, 2.0, 4.0]
    """
    means = bin_curve(curve)[0]
    reach = len(means) // 100
    sums = np.concatenate([[0.0], np.cumsum(means.values)])
    at = np.arange(len(means))
    near = np.minimum(np.minimum(at, len(means) - 1 - at), reach)
    return Curve(means.steps, (sums[at + near + 1] - sums[at - near]) / (2 * near + 1))


def _draw_with_validation(axes: Any, run: RunHistory, name: str) -> None:
    curve, validation = run.curve(name), run.curve(f"validation_{name}")
    _draw_curve(axes, curve, name, label="training")
    _scale(axes, [curve, validation])
    if len(validation):
        style: Any = {"color": ACCENT, "ms": 4, "lw": 1.2, "label": "validation"}
        axes.plot(validation.steps, validation.values, "o-", **style)
        axes.lines[-1].set_clip_on(False)  # the last point is at the edge
        axes.legend(loc="upper right" if name == "loss" else "lower right")


def _draw_forecasts(axes: Any, run: RunHistory) -> None:
    """Draw the forecasts of the final loss that the run made, at their steps, with their band."""
    found = run.forecasts()
    if not len(found["end"]):
        return
    steps = found["end"].steps
    edges = (found["low"].values, found["high"].values)
    axes.fill_between(steps, *edges, color=FORECAST, alpha=0.2, lw=0)
    label = "forecast of the end, 80 % band"
    axes.plot(steps, found["end"].values, "--", color=FORECAST, lw=1.4, label=label)
    axes.legend(loc="upper right")


def _draw_curve(axes: Any, curve: Curve, title: str, label: str | None = None) -> None:
    axes.set_title(title)
    if not len(curve):
        return
    _draw_range(axes, curve, INK, 0.25)
    line = smooth(curve)
    axes.plot(line.steps, line.values, color=INK, lw=1.6, label=label)
    _scale(axes, [curve])


def _draw_range(axes: Any, curve: Curve, colour: Any, alpha: float) -> None:
    """Draw the raw values, or their range in each bin."""
    if len(curve) <= MAX_BINS:
        axes.plot(curve.steps, curve.values, color=colour, lw=0.8, alpha=alpha)
        return
    _, low, high = bin_curve(curve)
    # A logarithmic scale cannot show 0, and distorts a polygon with such a corner.
    visible = (low.values > 0) | bool((curve.values < 0).any())
    band = (low.steps, low.values, high.values)
    axes.fill_between(*band, where=visible, color=colour, alpha=alpha, lw=0)


def _scale(axes: Any, curves: Sequence[Curve]) -> None:
    values = np.concatenate([curve.values for curve in curves] or [np.zeros(0)])
    above = values[values > 0]
    if len(above) and (values >= 0).all() and above.max() / above.min() > _SPAN:
        axes.set_yscale("log", nonpositive="mask")


def _mark(axes: Any, skipped: Sequence[tuple[int, str]]) -> None:
    """Mark skipped steps at the upper edge."""
    if skipped:
        places = [step for step, _ in skipped][-MAX_BINS:]
        across = axes.get_xaxis_transform()
        axes.plot(places, [0.98] * len(places), "x", color=ALARM, ms=5, transform=across)


@contextmanager
def styled() -> Generator[None]:
    """Draw figures in the style of all plots while the context is active."""
    import matplotlib

    with warnings.catch_warnings(), matplotlib.rc_context(_STYLE):  # pyright: ignore
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a name may have any letters
        yield


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG or SVG, atomically."""
    kind = path.suffix.removeprefix(".")
    with atomic_file(path) as temporary:
        figure.savefig(temporary, format=kind, metadata={"Date": None} if kind == "svg" else None)
