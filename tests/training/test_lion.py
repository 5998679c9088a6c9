"""Lion itself; against its paper it is tested in `test_optimizer`."""

from __future__ import annotations

import torch

from ingot.training.lion import Lion


def test_a_weight_without_a_gradient_stays() -> None:
    used, unused = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    used.grad = torch.tensor([1.0, 0.0])
    Lion([used, unused], lr=0.5).step()
    assert used.tolist() == [0.5, 1.0]  # the sign of 0 is 0
    assert unused.tolist() == [1.0, 1.0]
