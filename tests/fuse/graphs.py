"""Graphs of Dynamo, and what the passes do to them without Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from ingot.fuse.backend import rewrite_graph
from ingot.fuse.passes import PASSES, Rewrite
from ingot.fuse.report import GraphReport


def capture(function: Callable[..., Any], *args: Any, dynamic: bool | None = None) -> fx.Graph:
    """Return the graph that Dynamo captures."""
    graphs: list[fx.Graph] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    return graphs[-1]


def rewritten(
    function: Callable[..., Any], passes: Iterable[Rewrite] = PASSES
) -> tuple[Callable[..., Any], list[GraphReport]]:
    """Return a function whose rewritten graphs run eagerly, and their reports."""
    reports: list[GraphReport] = []

    def backend(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        reports.append(rewrite_graph(module, inputs, passes, always=True))
        return module.forward

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, fullgraph=True), reports


def outputs_and_gradients(function: Callable[..., Any], *args: Any) -> list[Tensor]:
    """Return the result of a function of tensors, and the gradients of its floating arguments."""
    leaves = [arg.detach().requires_grad_() if arg.is_floating_point() else arg for arg in args]
    out = function(*leaves)
    seed = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=seed, dtype=torch.float64).to(out.dtype))
    floating = [leaf for leaf in leaves if leaf.is_floating_point()]
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in floating]
    return [out.detach(), *grads]


def assert_left(function: Callable[..., Any], *args: Any) -> None:
    """Check that no pass rewrites a function, and that it computes the same."""
    expected = outputs_and_gradients(function, *args)
    compiled, reports = rewritten(function)
    found = outputs_and_gradients(compiled, *args)
    assert not reports[0].kept
    assert not reports[0].dropped
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
