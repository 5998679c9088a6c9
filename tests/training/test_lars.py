"""LARS itself; against its paper it is tested in `test_optimizer`."""

from __future__ import annotations

import pytest
import torch

from ingot.training.lars import LARS


def test_a_step_is_a_share_of_the_weight_whatever_the_gradient() -> None:
    for scale in (1e-6, 1e6):
        weight = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
        weight.grad = torch.tensor([0.0, scale])
        LARS([weight], lr=1.0, trust_coefficient=0.01).step()
        assert weight[1].item() == pytest.approx(4.0 - 0.05)


def test_a_weight_of_0_still_learns() -> None:
    weight, unused = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    weight.grad = torch.ones(2)
    LARS([weight, unused], lr=0.5).step()
    assert weight.tolist() == [-0.5, -0.5]
    assert unused.tolist() == [0.0, 0.0]
