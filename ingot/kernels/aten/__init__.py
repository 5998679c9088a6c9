"""The `aten` provider: the functions PyTorch itself has for an op.

Fast nearly everywhere and available everywhere, but not exact: the bits of a row may depend
on the size of the batch (`F.linear` picks another blocking for it, vectorised loops end in
scalar code). An op for which PyTorch has nothing better than the reference has no file here.

On a GPU, Triton's kernels come before these, save for calls that PyTorch has a kernel of its
vendor's or FlashAttention's for: those are registered with `ahead`, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from ingot.ops.dispatch import Override, always
from ingot.ops.gradient import Backward, differentiate
from ingot.ops.record import Op

PRIORITY = 10
F = TypeVar("F", bound=Callable[..., Any])


def on_gpu(x: Tensor) -> bool:
    """Whether a tensor is on a GPU that PyTorch's newer kernels are for.

    >>> on_gpu(torch.zeros(1))
    False
    """
    return x.is_cuda and capable(x.device.index)


@cache
def capable(index: int | None) -> bool:
    """Whether a GPU is NVIDIA's, of Ampere or later."""
    return torch.version.hip is None and torch.cuda.get_device_capability(index) >= (8, 0)


def aten(
    op: Op[..., Any],
    *,
    batch_invariant: bool = False,
    supports: Callable[..., bool] = always,
    backward: Backward | None = None,
    preferred_for: Override | None = None,
) -> Callable[[F], F]:
    """Register the decorated function for an op: `@aten(ops.silu)`.

    Its backward is asked of autograd unless given.
    """

    def register(forward: F) -> F:
        derived = differentiate(forward) if op.gradient else None
        op.provide(
            "aten",
            forward,
            batch_invariant=batch_invariant,
            supports=supports,
            backward=backward or derived,
            preferred_for=preferred_for,
        )
        return forward

    return register
