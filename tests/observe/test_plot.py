from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest

from ingot.core.errors import IngotError
from ingot.observe.history import Curve, RunHistory
from ingot.observe.plot import MAX_BINS, bin_curve, check, compare, draw, draw_layers, smooth
from tests.observe.fake_runs import LINES, run, step

LOG_SCALE = [step(i, 10.0 ** (1 - i), seconds=10.0**-i) for i in range(1, 9)]
MANY = [step(i, 3.0 / i + 0.2 * (i % 7)) for i in range(1, 1300)]


@pytest.mark.parametrize("lines", [LINES, MANY, [], LINES[:1], LOG_SCALE])
def test_curves_are_written_as_png_and_svg(tmp_path: Path, lines: list[object]) -> None:
    directory = run(tmp_path / "run", lines)
    files = [tmp_path / "curves.png", tmp_path / "curves.svg"]
    draw(RunHistory.read(directory), files)
    png = files[0].read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) == (1320, 780)
    assert files[1].read_text().rstrip().endswith("</svg>")


def test_unusual_names_are_shown_literally(tmp_path: Path) -> None:
    names = ("_hidden", "$x^{", "名前", "a</text><script>")
    names = tuple(name.replace("/", "-") for name in names)
    runs = [RunHistory.read(run(tmp_path / name, LINES)) for name in names]
    compare(runs * 11, tmp_path / "losses.svg")
    assert "<script" not in (tmp_path / "losses.svg").read_text()
    compare([], tmp_path / "none.png")


def test_bins_cover_a_long_curve() -> None:
    curve = Curve(np.arange(1, 1301), np.arange(1300.0))
    mean, low, high = bin_curve(curve)
    assert MAX_BINS * 0.75 < len(mean) <= MAX_BINS
    assert (low.values[0], high.values[-1]) == (0.0, 1299.0)
    assert (low.values <= mean.values).all()
    assert (mean.values <= high.values).all()


def test_smooth_is_a_mean_and_keeps_a_line() -> None:
    steps = np.arange(1, 301)
    line = smooth(Curve(steps, 2.0 * steps))
    np.testing.assert_allclose(line.values, 2.0 * steps)
    noise = np.where(steps % 2, 1.0, -1.0)
    assert abs(smooth(Curve(steps, noise)).values[10:-10]).max() < 0.2


@pytest.mark.parametrize(
    ("name", "what"), [("a.jpg", "'.jpg'"), ("none/a.png", "no such directory")]
)
def test_a_path_that_cannot_be_written_is_rejected_early(
    tmp_path: Path, name: str, what: str
) -> None:
    with pytest.raises(IngotError, match=what):
        check(tmp_path / name)


def test_a_missing_matplotlib_is_reported_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(IngotError, match=r"pip install 'ingot\[plot\]'"):
        check(Path("roofline.png"))


def test_bins_have_the_same_size() -> None:
    values = np.tile([0.0, 1.0], 350)
    _, low, high = bin_curve(Curve(np.arange(700), values), max_bins=400)
    assert len(low) == 350
    assert (high.values - low.values == 1.0).all()  # the band has no gap


@pytest.mark.parametrize("high", [0.2, 20.0])
def test_values_by_layer_have_a_curve_for_each_kind(tmp_path: Path, high: float) -> None:
    layers = np.arange(6)
    kinds = ("attention.qkv", "mlp.down")
    curves = {kind: Curve(layers, np.linspace(0.1, high, 6)) for kind in kinds}
    files = [tmp_path / "layers.png", tmp_path / "layers.svg"]
    draw_layers(curves, "error", files)
    assert files[0].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    text = files[1].read_text()
    assert all(f"<!-- {kind} -->" in text for kind in kinds)
    is_log = "mathdefault{10^" in text
    assert is_log == (high > 10)
