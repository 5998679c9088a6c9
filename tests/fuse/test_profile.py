"""A profile has the time, bytes and FLOPs of each call, and facts about its arguments."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ingot.fuse.profile import CallProfile, profile_graph
from tests.fuse.graphs import capture


def profile(function: object, *args: Tensor) -> dict[str, CallProfile]:
    with torch.no_grad():
        graph = capture(function, *args)  # type: ignore[arg-type]
    names = [n.name for n in graph.nodes if n.op == "placeholder"]
    known = {f"l_{name}_": arg for name, arg in zip("xw", args, strict=False)}
    values = [known[name] for name in names]
    return {call.name: call for call in profile_graph(fx.GraphModule({}, graph), values)}


def test_bytes_and_flops_of_a_matmul_and_of_a_view() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w).view(-1).exp()

    calls = profile(function, torch.randn(6, 8), torch.randn(4, 8))
    assert calls["linear"].flops == 2 * 6 * 8 * 4
    assert calls["linear"].bytes == 4 * (6 * 8 + 4 * 8 + 6 * 4)
    assert (calls["view"].bytes, calls["view"].flops) == (0, 0)
    assert calls["exp"].bytes == 2 * 4 * 24
    assert all(0 < call.seconds < 10 for call in calls.values())
    assert calls["linear"].source.startswith("test_profile.py:")


def test_flops_of_attention() -> None:
    def function(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)

    calls = profile(function, torch.randn(2, 3, 5, 4))
    assert calls["sdpa"].flops == 4 * (2 * 3 * 5 * 4) * 5


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (torch.ones(5, 5).tril().bool(), {"dense_mask", "causal_mask"}),
        (torch.ones(5, 5).tril().log(), {"dense_mask", "causal_mask"}),
        (torch.ones(5, 5).bool(), {"dense_mask", "empty_mask"}),
        (torch.eye(5).bool(), {"dense_mask"}),
    ],
)
def test_masks_are_known_by_their_values(mask: Tensor, expected: set[str]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, attn_mask=w)

    assert profile(function, torch.randn(2, 3, 5, 4), mask)["sdpa"].notes == expected


def test_a_weight_that_is_not_contiguous_is_noted() -> None:
    x, w = torch.randn(3, 8), torch.randn(8, 8)
    assert "strided_weight" in profile(lambda x, w: F.linear(x, w), x, w.t())["linear"].notes
    assert not profile(lambda x, w: F.linear(x, w), x, w)["linear"].notes
