"""A builder computes the shapes of what it adds."""

from __future__ import annotations

import torch
from torch import fx

from ingot import ops
from ingot.fuse.builder import Builder
from ingot.fuse.graph import VALUE


def test_added_calls_have_values() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta[VALUE] = torch.ones(2, 3, 5, 4)
    builder = Builder(graph)
    packed = builder.packed(x)
    assert packed.meta[VALUE].shape == (10, 3, 4)
    out = builder.unpacked(builder.op(ops.silu, packed), 2, 5)
    assert out.meta[VALUE].shape == (2, 3, 5, 4)
    graph.output(out)
    value = torch.randn(2, 3, 5, 4)
    found = fx.GraphModule({}, graph)(value)
    torch.testing.assert_close(found, torch.nn.functional.silu(value))


def test_sizes_are_constants_where_they_are_known() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta[VALUE] = torch.ones(2, 3)
    builder = Builder(graph)
    assert builder.size(x, 1) == 3
    starts = builder.cu_seqlens(3, 7)
    assert starts.meta[VALUE].tolist() == [0, 7, 14, 21]
    assert starts.meta[VALUE].dtype == torch.int32
