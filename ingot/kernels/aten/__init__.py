"""The `aten` provider: PyTorch's own functions.

They are available everywhere and nearly always fast, but not batch-invariant: the bits of a row may
depend on the size of the batch (`F.linear` chooses its blocking by it, vectorized loops end in
scalar code). Ops for which PyTorch has nothing faster than the reference have no module here.

On a GPU, Triton's kernels have priority, except for calls that PyTorch computes with a kernel of
the vendor or with FlashAttention: those are registered with `preferred_for` and a reason.
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
    """Return whether a tensor is on a GPU that PyTorch's newer kernels support.

    >>> on_gpu(torch.zeros(1))
    False
    """
    return x.is_cuda and capable(x.device.index)


@cache
def capable(index: int | None) -> bool:
    """Return whether a GPU is from NVIDIA, of the Ampere generation or later."""
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

    Without `backward`, autograd differentiates the function.
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
