from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ingot import ops
from ingot.core.errors import OpError
from ingot.ops.op import prefer


def tensors(*values: float) -> list[Tensor]:
    return [torch.full((3,), value) for value in values]


def test_it_is_the_update_of_torchs_optimizer() -> None:
    random = torch.Generator().manual_seed(0)
    shapes = [(5, 7), (3,), (2, 3, 4)]
    theirs = [torch.nn.Parameter(torch.randn(shape, generator=random)) for shape in shapes]
    ours = [p.detach().clone() for p in theirs]
    first, second = ([torch.zeros(shape) for shape in shapes] for _ in range(2))
    options: dict[str, Any] = {"lr": 0.05, "eps": 1e-6}
    optimizer = torch.optim.AdamW(theirs, betas=(0.8, 0.95), weight_decay=0.1, **options)
    for step in range(1, 6):
        grads = [torch.randn(shape, generator=random) for shape in shapes]
        for p, grad in zip(theirs, grads, strict=True):
            p.grad = grad
        optimizer.step()
        with prefer("reference"):
            betas = {"beta1": 0.8, "beta2": 0.95}
            ops.adamw(ours, grads, first, second, step, decay=0.1, **betas, **options)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=2e-6, atol=2e-6)


def test_decay_is_apart_from_the_gradient() -> None:
    """Without gradients and moments a parameter shrinks by lr * decay, whatever the step."""
    (p,) = tensors(2.0)
    ops.adamw([p], tensors(0.0), tensors(0.0), tensors(0.0), 7, 0.1, decay=0.5)
    torch.testing.assert_close(p, torch.full((3,), 2.0 * (1 - 0.05)))


def test_the_first_step_is_as_long_as_the_learning_rate() -> None:
    params = tensors(1.0, 1.0)
    state = tensors(0.0, 0.0), tensors(0.0, 0.0)
    ops.adamw(params, tensors(1e-3, -50.0), *state, 1, 0.1, decay=0.0)
    torch.testing.assert_close(torch.stack(params)[:, 0], torch.tensor([0.9, 1.1]))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"params": []}, "[0, 1, 1, 1]"),
        ({"grads": [torch.ones(4)]}, "parameter 0 is (3,)"),
        ({"grads": [torch.ones(3).bfloat16()]}, "torch.bfloat16"),
        ({"first": [torch.ones(3).bfloat16()]}, "parameters and gradients"),
        ({"second": [torch.ones(3, device="meta")]}, "meta"),
        ({"step": 0}, "step 0"),
        ({"beta2": 1.0}, "betas"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, Any], message: str) -> None:
    names = ("params", "grads", "first", "second")
    args: dict[str, Any] = {name: tensors(1.0) for name in names} | {"step": 1, "lr": 0.1}
    with pytest.raises(OpError) as caught:
        ops.adamw(**(args | changed))
    assert message in str(caught.value)
