"""Reports name what was kept, what was dropped and what was left."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.fuse.passes import PASSES
from ingot.fuse.report import MAX_RECENT, FusionReport, GraphReport, recent, record
from ingot.ops import Cost
from tests.fuse.graphs import rewritten


def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return F.layer_norm(F.linear(F.linear(x, w), w), (8,), v).sin()


def test_equal_rewrites_are_one_row() -> None:
    compiled, reports = rewritten(function)
    compiled(torch.randn(2, 8), torch.randn(8, 8), torch.ones(8))
    (report,) = reports
    text = str(FusionReport(graphs=reports))
    assert dict(report.kept) == {"linear": 2, "layer_norm": 1}
    assert "graph 0: 100% of FLOPs and 88% of bytes in ingot's kernels, 1 calls left" in text
    assert "1 x layer_norm      float32 2x8" in text


def test_shares_are_those_of_the_calls_before_the_passes() -> None:
    compiled, reports = rewritten(lambda x, w: (x @ w.sin(), F.linear(x, w).sin()))
    compiled(torch.randn(2, 8), torch.randn(8, 8))
    matmul = 4 * (2 * 8 + 8 * 8 + 2 * 8)
    (report,) = reports
    assert report.replaced == Cost(flops=2 * 2 * 8 * 8, bytes=matmul)
    assert report.work == Cost(
        flops=2 * 2 * 2 * 8 * 8, bytes=2 * matmul + 4 * (2 * 8 * 8 + 2 * 2 * 8)
    )
    assert report.shares[0] == 0.5


def test_dropped_and_left_matches_have_a_reason() -> None:
    linear = next(p for p in PASSES if p.name == "linear")
    wrong = replace(linear, build=lambda b, m: (b.method("neg", linear.build(b, m)[0]),))
    other = replace(linear, build=lambda b, m: (b.method("double", linear.build(b, m)[0]),))
    for fault, expected in ((wrong, "dropped: its error is"), (other, "another shape or dtype")):
        compiled, reports = rewritten(lambda x, w: F.linear(x, w), [fault])
        compiled(torch.randn(2, 8), torch.randn(8, 8))
        assert expected in str(reports[0])
        assert not reports[0].kept


def test_the_process_keeps_a_bounded_number_of_reports() -> None:
    for _ in range(MAX_RECENT + 3):
        record(GraphReport(rows=(), skipped=(), calls_left=0))
    assert len(recent()) == MAX_RECENT
