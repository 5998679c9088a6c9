"""SOAP itself; against its paper it is tested in `test_optimizer`."""

from __future__ import annotations

import pytest
import torch

from ingot.core.errors import ConfigError
from ingot.training.soap import SOAP


def test_the_first_gradient_does_not_update_the_weights() -> None:
    weight, unused = (torch.nn.Parameter(torch.eye(3)) for _ in range(2))
    weight.grad = torch.randn(3, 3)
    SOAP([weight, unused], lr=1.0).step()
    assert torch.equal(weight.detach(), torch.eye(3))


def test_a_long_side_is_not_turned() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 5))
    optimizer = SOAP([weight], max_precond_dim=4)
    for _ in range(2):
        weight.grad = torch.randn(3, 5)
        optimizer.step()
    assert {"left_basis", "left_moments"} <= optimizer.state[weight].keys()
    assert not {"right_basis", "right_moments"} & optimizer.state[weight].keys()


def test_only_matrices() -> None:
    with pytest.raises(ConfigError, match="another optimizer"):
        SOAP([torch.nn.Parameter(torch.ones(3))])
