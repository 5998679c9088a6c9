"""Tests of the epilogue of linear ops."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ingot import ops
from ingot.core.errors import OpError
from ingot.ops import ActivationFn
from ingot.ops.epilogue import apply_epilogue, check_epilogue, with_activations
from ingot.ops.inputs import SampleInput, TensorMaker

RANDOM = torch.Generator().manual_seed(0)
X, W, B = (torch.randn(*shape, generator=RANDOM) for shape in ((5, 16), (8, 16), (8,)))


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        (ActivationFn.IDENTITY, lambda y: y),
        (ActivationFn.GELU, ops.gelu),
        (ActivationFn.GELU_TANH, ops.gelu_tanh),
        (ActivationFn.SILU, ops.silu),
        (ActivationFn.RELU, torch.relu),
    ],
)
def test_epilogue_applies_activation_then_residual(
    activation: ActivationFn, function: Callable[[Tensor], Tensor]
) -> None:
    expected = function(torch.nn.functional.linear(X, W, B))
    torch.testing.assert_close(ops.linear(X, W, B, activation), expected)
    residual = torch.ones(5, 8)
    fused = ops.linear(X, W, B, activation, residual)
    torch.testing.assert_close(fused, expected + 1)
    up = W.flip(0)
    gated = function(X @ W.T) * (X @ up.T)
    torch.testing.assert_close(ops.gated_linear(X, W, up, activation), gated)


@pytest.mark.parametrize("activation", [-1, 5])
def test_unknown_activations_are_rejected(activation: int) -> None:
    with pytest.raises(OpError, match="activation must be an ActivationFn"):
        ops.linear(X, W, B, activation)
    with pytest.raises(OpError, match="activation must be an ActivationFn"):
        ops.gated_linear(X, W, W, activation)


def test_epilogue_adds_bias_before_and_residual_after_the_activation() -> None:
    y, bias, residual = torch.tensor([[-3.0, 1.0]]), torch.tensor([1.0, 1.0]), torch.ones(1, 2)
    expected = torch.tensor([[1.0, 3.0]])
    assert torch.equal(apply_epilogue(y, bias, ActivationFn.RELU, residual), expected)


@pytest.mark.parametrize(
    ("bias", "residual", "message"),
    [((7,), None, r"bias must be \(8,\), got \(7,\)"), (None, (5, 1), "residual must have")],
)
def test_bias_or_residual_of_another_shape_raises(
    bias: tuple[int, ...] | None, residual: tuple[int, ...] | None, message: str
) -> None:
    made = [None if shape is None else torch.ones(shape) for shape in (bias, residual)]
    with pytest.raises(OpError, match=message):
        check_epilogue("linear", X, 8, made[0], ActivationFn.IDENTITY, made[1])


def test_samples_cover_every_activation_with_the_default_first() -> None:
    samples = list(
        with_activations(
            lambda make: iter([SampleInput("odd", (make(1),))]),
            TensorMaker(torch.float32),
            ActivationFn.SILU,
        )
    )
    assert samples[0].name == "odd"
    assert [sample.args[-1] for sample in samples[:1]] == [ActivationFn.SILU]
    assert {sample.args[-1] for sample in samples} == set(ActivationFn)
