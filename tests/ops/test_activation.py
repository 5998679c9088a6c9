from __future__ import annotations

import pytest
import torch

from ingot import ops

X = torch.linspace(-6, 6, 49)[None]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ops.gelu, torch.nn.GELU()),
        (ops.gelu_tanh, torch.nn.GELU(approximate="tanh")),
        (ops.silu, torch.nn.SiLU()),
        (ops.relu_squared, lambda x: torch.relu(x) ** 2),
    ],
)
def test_reference_equals_the_torch_module(ours: ops.Op, theirs: torch.nn.Module):
    torch.testing.assert_close(ours.reference(X.double()), theirs(X.double()))


@pytest.mark.parametrize(
    ("gated", "activation"),
    [
        (ops.swiglu, ops.silu),
        (ops.geglu, ops.gelu),
        (ops.geglu_tanh, ops.gelu_tanh),
    ],
)
def test_gated_form_multiplies_activation_and_up(gated: ops.Op, activation: ops.Op) -> None:
    torch.testing.assert_close(gated(X, X + 1), activation(X) * (X + 1))
