"""Gradients derived from a forward: run it again, and ask autograd.

This is the backward of every op that has no better one. It runs inside the kernel of
`ingot::<op>_backward`, and there lies the difficulty: see `_TOP_OF_DISPATCH`.
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
# What makes a backward out of a forward.
Gradient = Callable[[Callable[..., Any]], Backward]

# A kernel runs where the dispatcher has passed autograd already, and under a TorchDispatchMode
# (selective checkpointing, FLOP counters, opcheck) autograd stays switched off in it. This is
# the dispatcher's state at the top of a call, which a derived backward needs to record its
# graph: that of a new thread, whatever modes this module is imported under. No public call
# does it; torch's own `invoke_leaf_function` uses the same guard.
with ThreadPoolExecutor(1) as _thread:
    _TOP_OF_DISPATCH = (
        _thread.submit(torch._C._dispatch_tls_local_include_set).result(),
        _thread.submit(torch._C._dispatch_tls_local_exclude_set).result(),
    )


def differentiate(forward: Callable[..., Any]) -> Backward:
    """The backward of a function made of differentiable torch calls: run it again, and ask
    autograd."""

    def backward(needs: list[bool], grads: list[Tensor], *args: Any) -> list[Tensor | None]:
        with torch._C._ForceDispatchKeyGuard(*_TOP_OF_DISPATCH), torch.enable_grad():
            leaves = [
                arg.detach().requires_grad_() if needed else arg
                for arg, needed in zip(args, needs, strict=True)
            ]
            return vjp(as_tuple(forward(*leaves)), grads, leaves, needs)

    return backward


def vjp(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor],
    args: Sequence[Any],
    needs: Sequence[bool],
    create_graph: bool = False,
) -> list[Tensor | None]:
    """Autograd's gradient of each argument that needs one; `again` if it will be differentiated."""
    # An output may have nothing to do with what is needed: the sum of add_rms_norm with its weight.
    pairs = [pair for pair in zip(outputs, grads, strict=True) if pair[0].requires_grad]
    wanted = [arg for arg, needed in zip(args, needs, strict=True) if needed]
    found = torch.autograd.grad(
        [output for output, _ in pairs],
        wanted,
        [grad for _, grad in pairs],
        create_graph=create_graph,
        allow_unused=True,
    )
    rest = iter(found)
    return [next(rest) if needed else None for needed in needs]
