"""Gradients derived from a forward: recompute it and differentiate it with autograd.

This is the backward of every op whose providers have none. It runs inside the kernel of
`ingot::<op>_backward`, where autograd is off: see `_TOP_OF_DISPATCH`.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ingot.ops.arguments import as_tuple

# backward(needs, grads, *args): a gradient per argument, None where it is not needed or zero.
Backward = Callable[..., Sequence[Tensor | None]]
# Derives a backward from a forward.
Gradient = Callable[[Callable[..., Any]], Backward]

# In a kernel, the dispatcher is already below autograd, and under a TorchDispatchMode (selective
# checkpointing, FLOP counters, opcheck) autograd stays off. To record its graph, a derived backward
# needs the dispatcher's state at the top of a call. A new thread has that state, whatever modes are
# active while this module is imported. Torch has no public API for it; its own
# `invoke_leaf_function` uses the same guard.
with ThreadPoolExecutor(1) as _thread:
    _TOP_OF_DISPATCH = (
        _thread.submit(torch._C._dispatch_tls_local_include_set).result(),
        _thread.submit(torch._C._dispatch_tls_local_exclude_set).result(),
    )


def differentiate(forward: Callable[..., Any]) -> Backward:
    """Return the backward of a function of differentiable torch calls, which recomputes it."""

    def backward(needs: list[bool], grads: list[Tensor], *args: Any) -> list[Tensor | None]:
        with torch._C._ForceDispatchKeyGuard(*_TOP_OF_DISPATCH), torch.enable_grad():
            leaves = [
                arg.detach().requires_grad_() if needed else arg
                for arg, needed in zip(args, needs, strict=True)
            ]
            return vjp(as_tuple(forward(*leaves)), grads, leaves, needs)

    return backward


def straight_through(forward: Callable[..., Any]) -> Backward:
    """Return the backward of a function that rounds, as if it did not.

    The forward has to pass the gradient through its rounding. The result is not the derivative,
    which is zero almost everywhere, but the one of the function without rounding.
    """
    return differentiate(forward)


def vjp(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    args: Sequence[Any],
    needs: Sequence[bool],
    create_graph: bool = False,
) -> list[Tensor | None]:
    """Return autograd's gradient of each argument that needs one, None for the others."""
    # An output may not depend on what is needed: the sum of add_rms_norm does not on its weight.
    pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad]
    wanted = [arg for arg, needed in zip(args, needs, strict=True) if needed]
    gradients = torch.autograd.grad(
        [output for output, _ in pairs],
        wanted,
        [grad for _, grad in pairs],
        create_graph=create_graph,
        allow_unused=True,
    )
    remaining = iter(gradients)
    return [next(remaining) if needed else None for needed in needs]
