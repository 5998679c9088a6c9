"""LAMB itself; against its paper it is tested in `test_optimizer`."""

from __future__ import annotations

import pytest
import torch

from ingot.training.lamb import LAMB, trust_ratios


def test_a_step_is_as_long_as_the_weight() -> None:
    weight = torch.nn.Parameter(torch.tensor([30.0, 40.0]))
    unused = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1e-3, 5.0])
    LAMB([weight, unused], lr=0.1).step()
    assert torch.dist(weight.detach(), torch.tensor([30.0, 40.0])).item() == pytest.approx(
        5.0, rel=1e-5
    )
    assert unused.tolist() == [1.0, 1.0]


def test_where_a_norm_is_0_the_ratio_is_1() -> None:
    zero, one = torch.zeros(3), torch.ones(3)
    assert [float(ratio) for ratio in trust_ratios([zero, one, zero], [one, zero, zero])] == [
        1.0
    ] * 3
