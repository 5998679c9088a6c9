from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ingot import ops
from ingot.ops.loss import CHUNK

RANDOM = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT = (torch.randn(*s, generator=RANDOM).double() for s in ((6, 8), (11, 8)))
TARGETS = torch.tensor([3, 0, 10, -100, 7, -100])


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any op below it makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for out in result if isinstance(result, list | tuple) else (result,):
            if isinstance(out, Tensor):
                self.elements = max(self.elements, out.numel())
        return result


def test_it_is_torchs_cross_entropy() -> None:
    logits = HIDDEN @ WEIGHT.T
    for smoothing in (0.0, 0.2):
        theirs = F.cross_entropy(logits, TARGETS, reduction="none", label_smoothing=smoothing)
        with ops.prefer("reference"):
            ours = ops.cross_entropy(logits, TARGETS, label_smoothing=smoothing)
        torch.testing.assert_close(ours, theirs)


def test_z_loss_punishes_the_normalizer() -> None:
    logits, targets = torch.zeros(1, 4), torch.tensor([1])
    with_z = ops.cross_entropy(logits, targets, z_loss=0.5)
    without = ops.cross_entropy(logits, targets)
    torch.testing.assert_close(with_z - without, 0.5 * torch.tensor([4.0]).log().square())


def test_a_token_that_cannot_be_does_not_spoil_the_loss() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 1.0]], requires_grad=True)
    loss = ops.cross_entropy(logits, torch.tensor([0]), z_loss=1e-4)
    (grad,) = torch.autograd.grad(loss.sum(), logits)
    assert loss.isfinite().all()
    assert grad.isfinite().all()


def test_logprobs_are_the_loss_with_the_other_sign() -> None:
    targets = TARGETS.clamp_min(0)
    loss = ops.linear_cross_entropy(HIDDEN, WEIGHT, targets)
    torch.testing.assert_close(ops.linear_token_logprobs(HIDDEN, WEIGHT, targets), -loss)
    torch.testing.assert_close(ops.token_logprobs(HIDDEN @ WEIGHT.T, targets), -loss)


def test_ignored_tokens_lose_nothing_and_teach_nothing() -> None:
    hidden = HIDDEN.clone().requires_grad_()
    loss = ops.linear_cross_entropy(hidden, WEIGHT, TARGETS)
    assert torch.equal(loss == 0, TARGETS == -100)
    loss.sum().backward()
    assert torch.equal((hidden.grad == 0).all(-1), TARGETS == -100)


def test_all_logits_never_exist_at_once() -> None:
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
