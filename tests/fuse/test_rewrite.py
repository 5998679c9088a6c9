"""Rewriting keeps the graph's order, what is needed elsewhere, and can be undone."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ingot.fuse.graph import GraphSpec
from ingot.fuse.passes import PASSES
from ingot.fuse.rewrite import erase_dead, live_nodes, run_passes, undo
from tests.fuse.graphs import capture

X, W, V = torch.randn(2, 8), torch.randn(8, 8), torch.randn(8)


def block(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    total = x + F.layer_norm(x, (8,), v)
    y = F.gelu(F.linear(F.layer_norm(total + x, (8,), v), w, v))
    return total + y, total


def run(graph: fx.Graph, *args: Tensor) -> Any:
    """Run a graph of Dynamo, whose inputs are in the order of their use."""
    values = {f"l_{name}_": value for name, value in zip("xwv", args, strict=False)}
    return fx.GraphModule({}, graph)(
        *(values[n.name] for n in graph.nodes if n.op == "placeholder")
    )


def close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_rewrites_are_undone_in_any_number() -> None:
    for kept in range(5):
        graph = capture(block, X, W, V)
        applied, _ = run_passes(graph, PASSES)
        assert [a.rewrite.name for a in applied] == ["linear", "add_layer_norm", "layer_norm"]
        close(run(graph, X, W, V), block(X, W, V))
        for rewrite in reversed(applied[kept:]):
            undo(graph, rewrite, applied)
        erase_dead(graph)
        graph.lint()
        close(run(graph, X, W, V), block(X, W, V))
        ours = [n for n in graph.nodes if "ingot" in str(n.target)]
        assert len(ours) == min(kept, 3)


def test_before_and_after_are_functions_of_the_same_inputs() -> None:
    graph = capture(block, X, W, V)
    applied, _ = run_passes(graph, PASSES)
    for rewrite in applied:
        args = [torch.randn(n.meta["example_value"].shape) for n in rewrite.inputs]
        close(rewrite.after(*args), rewrite.before(*args))


def test_replaced_calls_stay_until_they_are_erased() -> None:
    graph = capture(block, X, W, V)
    spec = GraphSpec.of(graph)
    run_passes(graph, PASSES)
    dead = set(graph.nodes) - live_nodes(graph)
    assert {n.name for n in dead} >= {"linear"}
    erase_dead(graph)
    assert set(graph.nodes) == live_nodes(graph)
    spec.check(graph, "all")


def test_a_matmul_that_is_needed_elsewhere_through_a_view_is_computed_once() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = torch.addmm(v, x, w).view(2, 8)
        return y + torch.pow(y, 3.0)

    graph = capture(function, X, W, V)
    applied, _ = run_passes(graph, PASSES)
    assert [a.rewrite.name for a in applied] == ["linear"]
    erase_dead(graph)
    assert not any(node.target is torch.addmm for node in graph.nodes)
    close([run(graph, X, W, V)[0]], [function(X, W, V)])


def test_layers_share_the_starts_of_their_sequences() -> None:
    def layers(q: Tensor) -> Tensor:
        for _ in range(3):
            q = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        return q

    q = torch.randn(2, 4, 6, 8)
    for dim in (0, 2):
        torch._dynamo.mark_dynamic(q, dim)
    graph = capture(layers, q)
    applied, _ = run_passes(graph, PASSES)
    assert len(applied) == 3
    assert sum(n.target is torch.arange for n in graph.nodes) == 1
    inputs = [n.meta["example_value"] for n in graph.nodes if n.op == "placeholder"]
    values = [q if isinstance(v, Tensor) else v.node.hint for v in inputs]
    torch.testing.assert_close(fx.GraphModule({}, graph)(*values)[0], layers(q))


def test_a_view_that_is_also_an_argument_is_not_inside() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        flat = x.view(-1, 8)
        return flat + torch.addmm(v, flat, w)

    x = torch.randn(2, 3, 8)
    graph = capture(function, x, W, V)
    applied, skipped = run_passes(graph, PASSES)
    assert [a.rewrite.name for a in applied] == ["linear"]
    assert not skipped
    values = {"l_x_": x, "l_w_": W, "l_v_": V}
    names = [node.name for node in graph.nodes if node.op == "placeholder"]
    (found,) = fx.GraphModule({}, graph)(*(values[name] for name in names))
    torch.testing.assert_close(found, function(x, W, V), atol=1e-5, rtol=1e-5)
