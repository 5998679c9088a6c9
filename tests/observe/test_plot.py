from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest

from ingot.core.errors import IngotError
from ingot.observe.history import Curve, RunHistory
from ingot.observe.plot import PIECES, check, compare, draw, pieces, smooth
from tests.observe.fake_runs import LINES, run, step

MANY = [step(i, 3.0 / i + 0.2 * (i % 7)) for i in range(1, 1300)]


@pytest.mark.parametrize(
    "lines", [LINES, MANY, [], LINES[:1], [step(i, 10.0 ** (1 - i)) for i in range(1, 9)]]
)
def test_curves_are_drawn(tmp_path: Path, lines: list[object]) -> None:
    directory = run(tmp_path / "run", lines)
    files = [tmp_path / "curves.png", tmp_path / "curves.svg"]
    draw(RunHistory.read(directory), files)
    png = files[0].read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", png[16:24]) == (1320, 780)
    assert files[1].read_text().rstrip().endswith("</svg>")


def test_strange_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    names = ("_hidden", "$x^{", "名前", "a</text><script>")
    names = tuple(name.replace("/", "-") for name in names)
    runs = [RunHistory.read(run(tmp_path / name, LINES)) for name in names]
    compare(runs * 11, tmp_path / "losses.svg")
    assert "<script" not in (tmp_path / "losses.svg").read_text()
    compare([], tmp_path / "none.png")


def test_pieces_have_all_of_a_long_curve() -> None:
    curve = Curve(np.arange(1, 1301), np.arange(1300.0))
    mean, least, most = pieces(curve)
    assert PIECES * 0.75 < len(mean) <= PIECES
    assert (least.values[0], most.values[-1]) == (0.0, 1299.0)
    assert (least.values <= mean.values).all()
    assert (mean.values <= most.values).all()


def test_smooth_is_a_mean_and_keeps_a_line() -> None:
    steps = np.arange(1, 301)
    line = smooth(Curve(steps, 2.0 * steps))
    np.testing.assert_allclose(line.values, 2.0 * steps)
    noise = np.where(steps % 2, 1.0, -1.0)
    assert abs(smooth(Curve(steps, noise)).values[10:-10]).max() < 0.2


@pytest.mark.parametrize(
    ("name", "what"), [("a.jpg", "'.jpg'"), ("none/a.png", "no such directory")]
)
def test_a_plot_that_cannot_be_is_refused_before(tmp_path: Path, name: str, what: str) -> None:
    with pytest.raises(IngotError, match=what):
        check(tmp_path / name)


def test_a_missing_matplotlib_has_its_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(IngotError, match=r"pip install 'ingot\[plot\]'"):
        check(Path("roofline.png"))


def test_pieces_are_of_one_length() -> None:
    values = np.tile([0.0, 1.0], 350)
    _, least, most = pieces(Curve(np.arange(700), values), most=400)
    assert len(least) == 350
    assert (most.values - least.values == 1.0).all()  # the band behind a curve has no gap
