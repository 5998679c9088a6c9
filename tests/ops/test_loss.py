from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ingot import ops
from ingot.core.errors import OpError
from ingot.ops.loss import CHUNK

RANDOM = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT = (torch.randn(*s, generator=RANDOM).double() for s in ((6, 8), (11, 8)))
TARGETS = torch.tensor([3, 0, 10, -100, 7, -100])


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that any op allocates."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for out in result if isinstance(result, list | tuple) else (result,):
            if isinstance(out, Tensor):
                self.elements = max(self.elements, out.numel())
        return result


def test_loss_equals_torch_cross_entropy() -> None:
    logits = HIDDEN @ WEIGHT.T
    for smoothing in (0.0, 0.2):
        theirs = F.cross_entropy(logits, TARGETS, reduction="none", label_smoothing=smoothing)
        with ops.prefer("reference"):
            ours = ops.cross_entropy(logits, TARGETS, label_smoothing=smoothing)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("smoothing", [-1.0, 1.5, math.nan])
def test_smoothing_out_of_range_is_refused(dtype: torch.dtype, smoothing: float) -> None:
    hidden, weight = HIDDEN.to(dtype), WEIGHT.to(dtype)
    for loss in (
        lambda: ops.cross_entropy(hidden, TARGETS, -100, smoothing),
        lambda: ops.linear_cross_entropy(hidden, weight, TARGETS, -100, smoothing),
        lambda: ops.linear_cross_entropy_fwd_bwd(hidden, weight, TARGETS, -100, smoothing),
    ):
        with pytest.raises((OpError, RuntimeError), match="label_smoothing must be from 0 to 1"):
            loss()


def test_z_loss_adds_the_squared_normalizer() -> None:
    logits, targets = torch.zeros(1, 4), torch.tensor([1])
    with_z = ops.cross_entropy(logits, targets, z_loss=0.5)
    without = ops.cross_entropy(logits, targets)
    torch.testing.assert_close(with_z - without, 0.5 * torch.tensor([4.0]).log().square())


def test_logit_of_minus_infinity_keeps_the_loss_finite() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 1.0]], requires_grad=True)
    loss = ops.cross_entropy(logits, torch.tensor([0]), z_loss=1e-4)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isfinite().all()
    assert grad.isfinite().all()


def test_logprobs_are_the_negative_loss() -> None:
    targets = TARGETS.clamp_min(0)
    loss = ops.linear_cross_entropy(HIDDEN, WEIGHT, targets)
    torch.testing.assert_close(ops.linear_token_logprobs(HIDDEN, WEIGHT, targets), -loss)
    torch.testing.assert_close(ops.token_logprobs(HIDDEN @ WEIGHT.T, targets), -loss)


def test_ignored_tokens_have_no_loss_and_no_gradient() -> None:
    hidden = HIDDEN.clone().requires_grad_()
    loss = ops.linear_cross_entropy(hidden, WEIGHT, TARGETS)
    assert torch.equal(loss == 0, TARGETS == -100)
    loss.sum().backward()
    assert torch.equal((hidden.grad == 0).all(-1), TARGETS == -100)


def test_logits_are_never_materialized_at_once() -> None:
    tokens, vocabulary, width = 3 * CHUNK + 5, 64, 4
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocabulary, width, requires_grad=True)
    targets = torch.randint(vocabulary, (tokens,))
    # Straight to the kernels: a mode sees an op from outside, not what it does within.
    with Largest() as largest:
        ops.linear_cross_entropy.fallback(hidden.detach(), weight.detach(), targets)
    assert largest.elements == CHUNK * vocabulary
    with Largest() as largest:
        args = hidden.detach(), weight.detach(), targets, -100, 0.0, 0.0
        backward = ops.linear_cross_entropy.providers["reference"].backward
        assert backward is not None
        backward([True, True, False, False, False, False], [torch.ones(tokens)], *args)
    assert largest.elements <= CHUNK * vocabulary
    with Largest() as largest:
        ops.cross_entropy.fallback(hidden.detach() @ weight.detach().T, targets)
    assert largest.elements == tokens * vocabulary, "the measure sees logits where they exist"
