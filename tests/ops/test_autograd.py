"""Tests of the autograd of ops."""

from __future__ import annotations

import pytest
import torch

from ingot import ops
from ingot.core.errors import OpError
from ingot.ops.autograd import needed_gradients


def test_op_without_gradient_raises_in_backward() -> None:
    hidden, weight = torch.randn(1, 4, requires_grad=True), torch.randn(3, 4)
    losses, *_ = ops.linear_cross_entropy_fwd_bwd(hidden, weight, torch.tensor([2]))
    with pytest.raises(OpError, match="no gradient"):
        losses.sum().backward()


def test_inference_mode_works_before_and_after_training() -> None:
    x = torch.randn(2, 4)
    with torch.inference_mode():
        served = ops.rms_norm(x, torch.ones(4))
    trained = ops.rms_norm(x.requires_grad_(), torch.ones(4))
    assert torch.equal(served, trained)
    trained.sum().backward()


def test_returned_gradients_share_no_storage() -> None:
    x = torch.ones(2, 3)
    grad = torch.ones(2, 3)
    first, second, third = needed_gradients(
        [x, x, x, x], [grad, grad, None, None], [True, True, False, True], [grad]
    )
    assert torch.equal(first, grad)
    assert torch.equal(second, grad)
    assert not third.any()
    assert len({t.data_ptr() for t in (grad, first, second, third)}) == 4
