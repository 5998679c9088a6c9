"""FLOPs and bytes of calls are those of their shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.fuse.work import work_of
from ingot.ops import Cost
from tests.fuse.graphs import capture

X, W, Q = torch.randn(2, 3, 8), torch.randn(4, 8), torch.randn(2, 3, 5, 4)
IMAGE, FILTER = torch.randn(2, 4, 9, 9), torch.randn(6, 2, 3, 3)
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], int, int]] = {
    "linear": (F.linear, (X, W), 2 * 6 * 8 * 4, 4 * (48 + 32 + 24)),
    "matmul": (torch.matmul, (X, W.t().contiguous()), 2 * 6 * 8 * 4, 4 * (48 + 32 + 24)),
    "addmm": (
        torch.addmm,
        (torch.randn(4), X[0].contiguous(), W.t().contiguous()),
        2 * 3 * 8 * 4,
        4 * (4 + 24 + 32 + 12),
    ),
    "attention_of_one": (
        lambda q: F.scaled_dot_product_attention(q, q, q),
        (Q,),
        4 * 120 * 5,
        4 * 2 * 120,
    ),
    "cross_attention": (
        F.scaled_dot_product_attention,
        (Q[:, :, :2].contiguous(), Q, Q + 1),
        4 * 48 * 5,
        4 * (48 + 120 + 120 + 48),
    ),
    "grouped_convolution": (
        lambda x, w: F.conv2d(x, w, groups=2),
        (IMAGE, FILTER),
        2 * (2 * 6 * 7 * 7) * 2 * 3 * 3,
        4 * (2 * 4 * 81 + 6 * 2 * 9 + 2 * 6 * 49),
    ),
    "exp": (torch.exp, (X,), 0, 2 * 4 * 48),
    "view": (lambda x: x.view(6, 8), (X,), 0, 0),
    "transpose": (lambda x: x.transpose(1, 2), (X,), 0, 0),
    "copy": (lambda x: x.transpose(1, 2).contiguous(), (X,), 0, 2 * 4 * 48),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_work_of_a_call(name: str, dynamic: bool) -> None:
    function, args, flops, num_bytes = CASES[name]
    graph = capture(function, *args, dynamic=dynamic)
    calls: list[Any] = [n for n in graph.nodes if n.op in ("call_function", "call_method")]
    assert work_of(calls[-1]) == Cost(flops=flops, bytes=num_bytes)
