"""Autograd of ops: `ingot::<op>_backward` is registered as the gradient of `ingot::<op>`.

The backward is an opaque op like the forward, so that it may be computed by a kernel and a compiled
graph contains one node in either case.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.arguments import as_tuple
from ingot.ops.dispatch import BATCH_INVARIANT, PREFERRED, saved_contexts
from ingot.ops.gradient import vjp
from ingot.ops.library import LIBRARY


def connect_backward(
    name: str, backward_op: Callable[..., Any], fallback: Callable[..., Any], differentiable: bool
) -> None:
    """Register `backward_op` as the gradient of `ingot::name`.

    With `create_graph=True`, `fallback` is differentiated instead, so that second derivatives work.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.preferred, ctx.batch_invariant = PREFERRED.get(), BATCH_INVARIANT.get()
        ctx.is_tensor = [isinstance(value, Tensor) for value in inputs]
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
        ctx.others = [None if isinstance(value, Tensor) else value for value in inputs]

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not differentiable:
            raise OpError(
                f"op '{name}' has no gradient",
                hint="detach its inputs, or exclude it from what is trained",
            )
        tensors = iter(ctx.saved_tensors)
        args = [
            next(tensors) if is_tensor else other
            for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
        ]
        passed = wanted_gradients(ctx)
        needs = [*passed, *(False for _ in args[len(passed) :])]
        if torch.is_grad_enabled():  # create_graph=True
            outputs = as_tuple(fallback(*args))
            return tuple(vjp(outputs, grads, args, needs, create_graph=True)[: len(passed)])
        # The backward may run in another thread, and after `with prefer(...)` has ended.
        with saved_contexts(ctx.preferred, ctx.batch_invariant):
            results = iter(backward_op(needs, [g.contiguous() for g in grads], *args))
        return tuple(next(results) if needed else None for needed in passed)

    torch.library.register_autograd(f"ingot::{name}", backward, setup_context=setup, lib=LIBRARY)


def wanted_gradients(ctx: Any) -> list[bool]:
    """Return for each argument that was passed whether this backward uses its gradient.

    `ctx.needs_input_grad` does not know which gradients `torch.autograd.grad` was asked for: those
    of inputs alone, for instance, in a zero-bubble pipeline.
    """
    edges = iter(ctx.next_functions)  # one for each tensor
    nodes = (next(edges)[0] if is_tensor else None for is_tensor in ctx.is_tensor)
    # excludes arguments that were left to their defaults
    return [need and _is_wanted(node) for need, node in zip(ctx.needs_input_grad, nodes)]  # noqa: B905


def _is_wanted(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient `torch.autograd.grad` returns
        return True


def needed_gradients(
    args: Sequence[Any], gradients: Sequence[Tensor | None], needs: list[bool], grads: list[Tensor]
) -> list[Tensor]:
    """Return the needed gradients as an op must: contiguous, none sharing its storage.

    `grads` are the gradients of the outputs, whose storage may not be returned either.
    """
    taken = {grad.untyped_storage().data_ptr() for grad in grads}
    return [
        _with_own_storage(gradient, arg, taken)
        for arg, gradient, needed in zip(args, gradients, needs, strict=True)
        if needed
    ]


def _with_own_storage(gradient: Tensor | None, arg: Tensor, taken: set[int]) -> Tensor:
    if gradient is None:
        return torch.zeros_like(arg, memory_format=torch.contiguous_format)
    gradient = gradient.contiguous()
    if gradient.untyped_storage().data_ptr() in taken:
        gradient = gradient.clone()
    taken.add(gradient.untyped_storage().data_ptr())
    return gradient
