from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ingot import ops
from ingot.ops.record import Op

X = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
MASK = torch.rand(4, 9, generator=torch.Generator().manual_seed(1)) > 0.3


def test_scale_and_mask_equal_torch() -> None:
    scores = (X * 0.3).masked_fill(~MASK, -torch.inf)
    torch.testing.assert_close(ops.softmax(X, 0.3, MASK), F.softmax(scores, -1))
    torch.testing.assert_close(ops.log_softmax(X, 0.3, MASK), F.log_softmax(scores, -1))


def test_fully_masked_row_is_zero_without_gradient() -> None:
    x = X.clone().requires_grad_()
    none = torch.zeros(4, 9, dtype=torch.bool)
    p = ops.softmax(x, 1.0, none)
    assert torch.equal(p, torch.zeros(4, 9))
    assert torch.equal(ops.log_softmax(X, 1.0, none), torch.full((4, 9), -torch.inf))
    (grad,) = torch.autograd.grad(p.sum(), x)
    assert torch.equal(grad, torch.zeros(4, 9))


def test_large_scores_do_not_overflow() -> None:
    assert torch.equal(ops.softmax(torch.tensor([[1e4, 0.0]])), torch.tensor([[1.0, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("op", [ops.softmax, ops.log_softmax], ids=lambda op: op.name)
@pytest.mark.parametrize("width", [1, 5, 21, 2051])
def test_row_of_minus_infinity_is_nan(op: Op[..., Tensor], dtype: torch.dtype, width: int) -> None:
    """For every provider. Only excluded entries become 0, never included ones."""
    x = torch.full((3, width), -torch.inf, dtype=dtype)
    x[1, -1] = 0.5
    half = torch.arange(width) % 2 == 0
    for mask in (None, torch.ones(3, 1, dtype=torch.bool), half):
        taken = torch.ones(width, dtype=torch.bool) if mask is None else mask.expand(3, width)[0]
        for provider in op.providers:
            with ops.prefer(provider):
                y = op(x, 1.0, mask)
            assert y[[0, 2]][:, taken].isnan().all(), provider
            assert torch.equal(y[0, ~taken], y[1, ~taken]), provider
            assert not y[1].isnan().any() or not taken[-1], provider
