from __future__ import annotations

from array import array
from pathlib import Path

from matplotlib import image

from ingot.bench.latency import draw
from ingot.bench.results import Run
from ingot.bench.serve import Answer
from ingot.serving.simulate import Goal


def drawn(answers: list[Answer], path: Path) -> float:
    """How much of the picture is not white."""
    draw(answers, Goal(), Run.now("0.1"), path)
    return float((image.imread(path)[..., :3].min(-1) < 0.9).mean())


def test_answers_are_drawn_and_none_are_no_error(tmp_path: Path) -> None:
    def answer(n: int) -> Answer:
        return Answer(0.1 * n, 4, 9, array("d", [0.5 * n + at for at in (1, 2, 4)]), 3, "length")

    none = drawn([Answer(0.0, 4, 9, end="429")], tmp_path / "none.png")
    some = drawn([answer(n) for n in range(9)], tmp_path / "some.png")
    assert 0 < none < some
