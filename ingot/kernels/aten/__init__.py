"""The `aten` provider: the functions PyTorch itself has for an op.

Fast nearly everywhere and available everywhere, but not exact: the bits of a row may depend
on the size of the batch (`F.linear` picks another blocking for it, vectorised loops end in
scalar code). An op for which PyTorch has nothing better than the reference has no file here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ingot.ops.gradient import Backward, differentiate
from ingot.ops.op import Ahead, Op, always

F = TypeVar("F", bound=Callable[..., Any])


def aten(
    op: Op[..., Any],
    *,
    exact: bool = False,
    supports: Callable[..., bool] = always,
    backward: Backward | None = None,
    ahead: Ahead | None = None,
) -> Callable[[F], F]:
    """Register the decorated function for an op: `@aten(ops.silu)`.

    Its backward is asked of autograd unless given.
    """

    def register(forward: F) -> F:
        derived = differentiate(forward) if op.gradient else None
        op.provide(
            "aten",
            forward,
            exact=exact,
            supports=supports,
            backward=backward or derived,
            ahead=ahead,
        )
        return forward

    return register
