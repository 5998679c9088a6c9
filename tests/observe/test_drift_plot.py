from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.observe.drift_plot import draw, residual_stream
from tests.observe.test_drift import comparison, layers, op

OPS = [
    *(op(f"blocks.{layer}.attention.out", 1e-3) for layer in range(3)),
    *layers(1e-3, 5e-1, 1e-3),
    op("norm", 1e-3),
]
CASES = {
    "ops": comparison(OPS),
    "equal": comparison(layers(0.0, 0.0), same_kernels=True),
    "server": comparison([]),
    "names": replace(comparison(OPS), model="$x^{<script>", other="名前" * 60),
}


@pytest.mark.parametrize("case", CASES)
def test_a_comparison_is_plotted(case: str, tmp_path: Path) -> None:
    files = [tmp_path / "compare.png", tmp_path / "compare.svg"]
    draw(CASES[case], files)
    width, height = struct.unpack(">II", files[0].read_bytes()[16:24])
    assert width > height > 400
    svg = files[1].read_text()
    assert svg.rstrip().endswith("</svg>")
    assert "<script" not in svg


def test_the_residual_stream_is_that_after_each_sublayer() -> None:
    post = [
        replace(op("blocks.0.attention.out", 0.1), error=0.1),
        replace(op("blocks.0.attention_residual", 0.1), error=0.2),
        replace(op("blocks.0.mlp.down", 0.1), error=0.3),
        replace(op("blocks.0.mlp_residual", 0.1), error=0.4),
    ]
    assert residual_stream(comparison(post)) == {
        "after attention": {0: 0.2},
        "after the MLP": {0: 0.4},
    }
    assert residual_stream(comparison(post[::2]))["after the MLP"] == {0: 0.3}
