"""Calls have one name in every spelling; the specification notices what a pass may not change."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ingot.fuse.graph import (
    GraphError,
    GraphSpec,
    mutations,
    named_call,
    same_shape,
    storage_roots,
)
from tests.fuse.graphs import capture

X = torch.randn(3, 4)


def names(graph: fx.Graph) -> list[str]:
    return [call.name for node in graph.nodes if (call := named_call(node))]


SPELLINGS: dict[str, list[Callable[[Tensor], Any]]] = {
    "add": [lambda x: x + 1, lambda x: torch.add(x, 1), lambda x: x.add(1)],
    "mul": [lambda x: x * 2, lambda x: torch.mul(x, 2), lambda x: x.mul(2)],
    "pow": [lambda x: x**2, lambda x: torch.pow(x, 2), lambda x: x.pow(exponent=2)],
    "softmax": [lambda x: x.softmax(-1), lambda x: F.softmax(x, dim=-1)],
    "silu": [F.silu, lambda x: F.silu(x, inplace=False)],
    "to": [lambda x: x.double(), lambda x: x.to(torch.float64)][1:],
    "relu": [torch.relu, F.relu, lambda x: x.relu()],
    "mean": [lambda x: x.mean(-1), lambda x: torch.mean(x, dim=-1)],
    "view": [lambda x: x.view(4, 3), lambda x: x.view((4, 3))],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_has_one_name_and_one_order_of_arguments(name: str) -> None:
    calls: list[Any] = []
    for function in SPELLINGS[name]:
        node = next(n for n in capture(function, X).nodes if n.op.startswith("call"))
        call = named_call(node)
        assert call is not None
        assert call.name == name
        calls.append(call.args[1:])
    assert all(args == calls[0] for args in calls)


def test_calls_with_other_arguments_have_no_name() -> None:
    out = torch.empty(3, 4)
    assert "add" not in names(capture(lambda x: torch.add(x, 1, alpha=2), X))
    assert "relu" not in names(capture(lambda x: F.relu(x * 1, inplace=True), X))
    assert "linear" not in names(capture(lambda x: x.add(1, out=out) if False else x.sin_(), X))


def set_first(x: Tensor) -> Tensor:
    x[0] = 0
    return x


MUTATING: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda x: (x * 1).add_(1),
    "setitem": lambda x: set_first(x * 1),
    "augmented": lambda x: operator.iadd(x * 1, 1),
    "inplace": lambda x: F.relu(x * 1, inplace=True),
    "copy": lambda x: (x * 1).copy_(x),
    "of_a_view": lambda x: (x * 1)[0].zero_() + x,
    "norm": lambda x: F.batch_norm(x * 1, torch.zeros(4), torch.ones(4), training=True),
}


@pytest.mark.parametrize("name", MUTATING)
def test_mutations_are_found_with_what_they_write_into(name: str) -> None:
    graph = capture(MUTATING[name], X)
    roots = {root.name for _, root in mutations(graph)}
    assert "mul" in roots


def test_pure_functions_mutate_nothing() -> None:
    graph = capture(lambda x: torch.sort(x.cumsum(0).sum(0))[0] + torch.einsum("ab->b", x), X)
    assert mutations(graph) == []


def test_views_share_the_root_of_what_they_view() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        return y.transpose(0, 1).reshape(-1)[:2].unsqueeze(0) + 1

    graph = capture(function, X)
    roots = {node.name: root.name for node, root in storage_roots(graph).items()}
    assert {roots[name] for name in roots if "unsqueeze" in name or "getitem" in name} == {"y"}
    assert roots["add"] == "add"


CHANGES: dict[str, Callable[[fx.Graph], None]] = {}


def _change(function: Callable[[fx.Graph], None]) -> Callable[[fx.Graph], None]:
    CHANGES[function.__name__] = function
    return function


def _output(graph: fx.Graph) -> fx.Node:
    return next(iter(reversed(graph.nodes)))


@_change
def returns_less(graph: fx.Graph) -> None:
    _output(graph).args = ((_output(graph).args[0][0],),)  # type: ignore[index]


@_change
def returns_another_shape(graph: fx.Graph) -> None:
    first, second = _output(graph).args[0]  # type: ignore[misc]
    _output(graph).args = ((second, first),)


@_change
def returns_an_input(graph: fx.Graph) -> None:
    source = next(n for n in graph.nodes if n.op == "placeholder")
    _output(graph).args = ((source, _output(graph).args[0][1]),)  # type: ignore[index]


@_change
def forgets_an_effect(graph: fx.Graph) -> None:
    node = next(n for n in graph.nodes if n.target == "add_")
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    graph.erase_node(node)


@pytest.mark.parametrize("name", CHANGES)
def test_the_specification_finds_a_change(name: str) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = (x * 2).add_(1)
        return y * 3, y.sum()

    graph = capture(function, X)
    spec = GraphSpec.of(graph)
    spec.check(graph, "nothing")
    CHANGES[name](graph)
    with pytest.raises(GraphError, match=r"pass wrong: the graph's (outputs|mutations) changed"):
        spec.check(graph, "wrong")


def test_symbolic_sizes_are_equal_only_if_they_must_be() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return x.sum() + y.sum()

    graph = capture(function, torch.ones(3, 5), torch.ones(7, 5), dynamic=True)
    one, other = (
        n.meta["example_value"]
        for n in graph.nodes
        if isinstance(n.meta.get("example_value"), Tensor) and n.op == "placeholder"
    )
    assert same_shape(one.shape[:1], one.shape[:1])
    assert not same_shape(one.shape[:1], other.shape[:1])
