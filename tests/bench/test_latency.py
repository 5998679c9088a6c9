from __future__ import annotations

from array import array
from pathlib import Path

from matplotlib import image

from ingot.bench.latency import draw
from ingot.bench.results import RunInfo
from ingot.bench.serve import RequestRecord
from ingot.serving.simulate import SLO


def ink(records: list[RequestRecord], path: Path) -> float:
    """Fraction of the picture that is not white."""
    draw(records, SLO(), RunInfo.now("0.1"), path)
    return float((image.imread(path)[..., :3].min(-1) < 0.9).mean())


def test_plot_of_records_also_without_any(tmp_path: Path) -> None:
    def record(n: int) -> RequestRecord:
        return RequestRecord(
            0.1 * n, 4, 9, array("d", [0.5 * n + at for at in (1, 2, 4)]), 3, "length"
        )

    none = ink([RequestRecord(0.0, 4, 9, finish_reason="429")], tmp_path / "none.png")
    some = ink([record(n) for n in range(9)], tmp_path / "some.png")
    assert 0 < none < some
