"""Patterns match what they say, in every order and through calls without effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ingot.fuse.graph import named_call
from ingot.fuse.pattern import (
    Anything,
    Arg,
    Call,
    Cast,
    Constant,
    Either,
    Given,
    Match,
    Number,
    Pattern,
    Reshaped,
    find,
)
from tests.fuse.graphs import capture

X, Y = torch.randn(2, 3), torch.randn(2, 3)
A, B = Arg("a"), Arg("b")


def matches(pattern: Pattern, function: Callable[..., Any], *args: Tensor) -> list[Match]:
    """Match at the result of a function."""
    graph = capture(function, *args)
    root = [node for node in graph.nodes if named_call(node)][-1]
    return list(find(pattern, root))


CASES: dict[str, tuple[Pattern, Callable[..., Any], bool]] = {
    "order": (Call("add", Call("tanh", A), B), lambda x, y: y + x.tanh(), True),
    "no_order": (Call("div", Call("tanh", A), B), lambda x, y: y / x.tanh(), False),
    "same": (Call("mul", A, A), lambda x, y: x * x, True),
    "not_same": (Call("mul", A, A), lambda x, y: x * y, False),
    "constant": (Call("pow", A, Constant(2)), lambda x, y: x.pow(2.0), True),
    "another_constant": (Call("pow", A, Constant(2)), lambda x, y: x.pow(3), False),
    "nearly": (Call("mul", A, Constant(0.044715)), lambda x, y: x * 0.04472, False),
    "bool_is_no_number": (Call("mul", A, Constant(1)), lambda x, y: x * True, False),
    "number": (Call("mul", A, Number("c")), lambda x, y: x * 0.5, True),
    "tensor_is_no_number": (Call("mul", A, Number("c")), lambda x, y: x * y, False),
    "either": (Either(Call("silu", A), Call("relu", A)), lambda x, y: torch.relu(x), True),
    "neither": (Either(Call("silu", A), Call("relu", A)), lambda x, y: torch.tanh(x), False),
    "default": (Call("gelu", A), lambda x, y: F.gelu(x), True),
    "no_default": (Call("gelu", A), lambda x, y: F.gelu(x, approximate="tanh"), False),
    "anything": (Call("gelu", A, Anything()), lambda x, y: F.gelu(x, approximate="tanh"), True),
    "dropout_off": (
        Call("tanh", Call("silu", A)),
        lambda x, y: F.dropout(F.silu(x), 0.5, False).tanh(),
        True,
    ),
    "dropout_on": (
        Call("tanh", Call("silu", A)),
        lambda x, y: F.dropout(F.silu(x), 0.5, True).tanh(),
        False,
    ),
    "no_cast": (Call("tanh", Call("silu", A)), lambda x, y: F.silu(x).float().tanh(), True),
    "cast": (Call("tanh", Call("silu", A)), lambda x, y: F.silu(x).to(torch.double).tanh(), False),
    "allowed_cast": (
        Call("tanh", Cast(Call("silu", A))),
        lambda x, y: F.silu(x).to(torch.double).tanh(),
        True,
    ),
    "integer_cast": (
        Call("tanh", Cast(Call("silu", A))),
        lambda x, y: F.silu(x).to(torch.int32).to(torch.float32).tanh(),
        False,
    ),
    "same_view": (Call("tanh", Call("silu", A)), lambda x, y: F.silu(x).view(2, 3).tanh(), True),
    "view": (Call("tanh", Call("silu", A)), lambda x, y: F.silu(x).view(3, 2).tanh(), False),
    "allowed_view": (
        Call("tanh", Reshaped(Call("silu", A))),
        lambda x, y: F.silu(x).view(3, 2).tanh(),
        True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pattern_matches_what_it_says(name: str) -> None:
    pattern, function, expected = CASES[name]
    assert bool(matches(pattern, function, X, Y)) is expected


def test_a_match_has_the_arguments_and_the_calls_inside() -> None:
    pattern = Given(Call("add", Call("tanh", A, output="t"), B), "kind", 7)
    match = matches(pattern, lambda x, y: y.tanh() + x, X, Y)[0]
    assert match["kind"] == 7
    assert match["t"] in match.inside
    assert [node.name for node in match.inside] == ["add", "tanh"]
    assert match.get("c") is None


def test_every_way_to_match_is_found() -> None:
    found = matches(Call("add", A, B), lambda x, y: x + y, X, Y)
    assert len({(match["a"].name, match["b"].name) for match in found}) == 2
