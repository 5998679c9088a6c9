from __future__ import annotations

import torch
import torch.nn.functional as F

from ingot import ops

X = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
MASK = torch.rand(4, 9, generator=torch.Generator().manual_seed(1)) > 0.3


def test_scale_and_mask_are_what_torch_would_do_by_hand() -> None:
    scores = (X * 0.3).masked_fill(~MASK, -torch.inf)
    torch.testing.assert_close(ops.softmax(X, 0.3, MASK), F.softmax(scores, -1))
    torch.testing.assert_close(ops.log_softmax(X, 0.3, MASK), F.log_softmax(scores, -1))


def test_a_row_with_nothing_left_is_nothing_and_teaches_nothing() -> None:
    x = X.clone().requires_grad_()
    none = torch.zeros(4, 9, dtype=torch.bool)
    p = ops.softmax(x, 1.0, none)
    assert torch.equal(p, torch.zeros(4, 9))
    assert torch.equal(ops.log_softmax(X, 1.0, none), torch.full((4, 9), -torch.inf))
    (grad,) = torch.autograd.grad(p.sum(), x)
    assert torch.equal(grad, torch.zeros(4, 9))


def test_large_scores_do_not_overflow() -> None:
    assert torch.equal(ops.softmax(torch.tensor([[1e4, 0.0]])), torch.tensor([[1.0, 0.0]]))
