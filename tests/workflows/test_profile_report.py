from __future__ import annotations

from pathlib import Path

import pytest

from ingot.observe.trace import Kind, OpTime, WindowProfile
from ingot.workflows.profile import Profile, Trial
from ingot.workflows.profile_report import kind_rows, op_rows, write_page
from tests.training import runs

WINDOW = WindowProfile(
    steps=2,
    seconds=0.2,
    kinds={Kind.INGOT: 0.12, Kind.COMMUNICATION: 0.06, Kind.PYTHON: 0.02},
    ops=[
        OpTime(name="ingot::linear", kind=Kind.INGOT, count=8, seconds=0.12, allocated=4_000_000),
        OpTime(name="all_reduce", kind=Kind.COMMUNICATION, count=2, seconds=0.06),
    ],
)


def profile(**fields: object) -> Profile:
    trials = [
        Trial(text="keep the activations", recipe=runs.xor(), speedup=1.5),
        Trial(text="train in <bfloat16>", recipe=runs.xor(), speedup=0.5),
    ]
    shares = [[0.6, 0.0, 0.0, 0.3, 0.0, 0.0, 0.0, 0.1]] * 2
    known = {"name": "run", "window": WINDOW, "trace": Path("trace.json.gz"), "trials": trials}
    known |= {"shares": shares, "step_seconds": 0.09, "rows_per_second": 12345.0}
    return Profile(**{**known, **fields})  # pyright: ignore[reportArgumentType]


def test_rows_are_of_a_step() -> None:
    assert kind_rows(WINDOW)[0] == ("ingot's kernels", "60.00", "60.0%")
    assert op_rows(WINDOW, 1) == [("ingot::linear", "4.0", "60.000", "60.0%", "2.00")]


def test_the_page_has_all_of_it(tmp_path: Path) -> None:
    html = write_page(profile(), tmp_path / "page").read_text()
    for text in (
        "compute is the bottleneck, 60% of the time; the slowest op is `ingot::linear` with 60%",
        "keep the activations: 1.50x as fast here",
        "train in &lt;bfloat16&gt;",
        "0.50x",
        "90.00 ms",
        "12,345",
        "<h2>Ranks</h2>",
        "ui.perfetto.dev",
        "data:image/svg+xml",
    ):
        assert text in html
    assert "bfloat16&gt;: 0.50x as fast" not in html
    assert (tmp_path / "page" / "time.png").stat().st_size > 10_000


def test_a_page_without_suggestions_says_so(tmp_path: Path) -> None:
    html = write_page(profile(trials=[], shares=[[1.0] + [0.0] * 7]), tmp_path).read_text()
    assert "Nothing that was tried made it faster." in html
    assert "<h2>Ranks</h2>" not in html
    assert "<h2>What was tried</h2>" not in html


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Kind.DATA, "the data is the bottleneck: the model waits for it 100% of the time"),
        (Kind.COMMUNICATION, "communication is the bottleneck: 100% of the time is collectives"),
        (Kind.PYTHON, "Python is the bottleneck: 100% of the time no op runs, or a call that"),
        (Kind.REQUESTS, "the engine waits for requests 100% of the time"),
    ],
)
def test_the_sentence_names_the_bottleneck(kind: Kind, sentence: str) -> None:
    window = WindowProfile(steps=1, seconds=1.0, kinds={kind: 1.0})
    assert profile(window=window).sentence.startswith(sentence)
