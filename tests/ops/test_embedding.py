from __future__ import annotations

import pytest
import torch

from ingot import ops


def test_gradient_of_a_repeated_token_accumulates() -> None:
    weight = torch.randn(4, 3, requires_grad=True)
    rows = ops.embedding(torch.tensor([2, 2, 0]), weight)
    (grad,) = torch.autograd.grad(rows.sum(), weight)
    assert torch.equal(grad[:, 0], torch.tensor([1.0, 0.0, 2.0, 0.0]))


@pytest.mark.parametrize("token", [4, -1])
def test_token_out_of_range_raises(token: int) -> None:
    for provider in ops.embedding.providers:
        with ops.prefer(provider), pytest.raises(IndexError, match="out of range"):
            ops.embedding(torch.tensor([token]), torch.randn(4, 3))
