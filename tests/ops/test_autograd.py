"""Tests of the autograd of ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

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


class _AskedFor(TorchDispatchMode):
    """Records which gradients the backwards of ops were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.needs: list[list[bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name().endswith("_backward"):
            self.needs.append(args[0][:3])
        return func(*args, **(kwargs or {}))


def test_only_the_gradients_that_are_asked_for_are_computed() -> None:
    leaf = torch.randn(2, 4, requires_grad=True)
    weight = torch.randn(3, 4, requires_grad=True)
    bias = torch.randn(3, requires_grad=True)
    hidden = leaf * 2
    y = ops.linear(hidden, weight, bias).sum()
    asked = {
        (leaf,): [True, False, False],
        (hidden,): [True, False, False],
        (weight,): [False, True, False],
        (bias, leaf): [True, False, True],
    }
    with _AskedFor() as mode:
        for inputs, needs in asked.items():
            grads = torch.autograd.grad(y, inputs, retain_graph=True)
            assert mode.needs.pop() == needs
            assert [grad.shape for grad in grads] == [one.shape for one in inputs]
        y.backward(inputs=[weight], retain_graph=True)
        assert mode.needs.pop() == [False, True, False]
        y.backward()
        assert mode.needs.pop() == [True, True, True]
    assert not mode.needs
    (once,) = torch.autograd.grad(ops.linear(hidden, weight).sum(), weight)
    assert weight.grad is not None
    assert torch.equal(weight.grad, 2 * once)
