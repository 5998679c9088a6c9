"""Tests of the decorator `op`: required fields, schemas, providers of a declared op."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot import ops
from ingot.core.errors import OpError
from ingot.ops.arguments import fake_like
from ingot.ops.dispatch import Override, batch_invariant, prefer
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import REGISTRY, Cost, Op, Tolerance


def samples(make: TensorMaker) -> Iterator[SampleInput]:
    yield SampleInput("typical", (make(3, 4),))


def cost(x: Tensor) -> Cost:
    return Cost(bytes=2 * x.nbytes, flops=x.numel())


def check(x: Tensor) -> None:
    pass


RECORD: dict[str, Any] = {
    "check": check,
    "fake": fake_like,
    "samples": samples,
    "tolerance": Tolerance(),
    "cost": cost,
    "row_args": ("x",),
}


@cache
def declare_made_up() -> Op[..., Any]:
    """Declare an op, once in a process: torch keeps its name."""

    @op(**RECORD)
    def made_up_double(x: Tensor) -> Tensor:
        return 2 * x

    return made_up_double


@pytest.fixture
def made_up() -> Iterator[Op[..., Any]]:
    """Yield an op that is in the registry during a test."""
    REGISTRY["made_up_double"] = declare_made_up()
    yield REGISTRY["made_up_double"]
    del REGISTRY["made_up_double"]


@pytest.mark.parametrize("missing", RECORD)
def test_missing_field_raises(missing: str) -> None:
    rest = {field: value for field, value in RECORD.items() if field != missing}
    with pytest.raises(TypeError, match=f"missing 1 required keyword-only argument: '{missing}'"):
        op(**rest)


def test_parameter_without_annotation_raises() -> None:
    with pytest.raises(ValueError, match="x must have a type annotation"):

        @op(**RECORD)
        def untyped(x):
            return x


def test_keyword_only_parameter_raises() -> None:
    with pytest.raises(OpError, match="keyword-only"):

        @op(**RECORD)
        def keyword_only(x: Tensor, *, eps: float = 0.0) -> Tensor:
            return x + eps


def test_declared_op_computes_forward_and_backward(made_up: Op[..., Any]) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(made_up(x).sum(), x)
    assert torch.equal(grad, torch.full((3, 4), 2.0))
    assert ops.registry()["made_up_double"] is made_up
    assert list(made_up.providers) == ["reference"]


def test_override_applies_except_for_batch_invariance(
    made_up: Op[..., Any],
) -> None:
    def forward(x: Tensor) -> Tensor:
        return x + x

    def backward(needs: list[bool], grads: list[Tensor], x: Tensor) -> list[Tensor]:
        chosen.append("aten")
        return [2 * grads[0]]

    chosen: list[str] = []
    preferred_for = Override(when=lambda x: len(x) > 2, reason="many rows")
    made_up.provide("triton", forward, batch_invariant=True)
    made_up.provide(
        "aten", forward, batch_invariant=False, backward=backward, preferred_for=preferred_for
    )
    made_up.__dict__.pop("providers", None)
    try:
        many, few = torch.ones(3, 4), torch.ones(2, 4)
        assert [made_up.select(x).name for x in (many, few)] == ["aten", "triton"]
        with batch_invariant():
            assert made_up.select(many).name == "triton"
            with prefer("aten"):  # asked for by name
                assert made_up.select(many).name == "aten"
        assert made_up.select(many).name == "aten"
        with torch.inference_mode():  # all serving
            assert made_up.select(many).name == "triton"
        x = torch.ones(3, 4, requires_grad=True)
        made_up(x).sum().backward()
        assert chosen == ["aten"]
        with batch_invariant():
            y = made_up(x)
        made_up.provide(
            "triton", forward, batch_invariant=True, backward=lambda n, g, x: [2 * g[0]]
        )
        made_up.__dict__.pop("providers", None)
        y.sum().backward()  # outside of the context, and still batch-invariant
        assert chosen == ["aten"]
    finally:
        for name in ("triton", "aten"):
            del made_up._registered[name]
        made_up.__dict__.pop("providers", None)
