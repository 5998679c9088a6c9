"""Checks of the arguments of ops; errors name the argument.

Ops neither broadcast nor promote: where PyTorch would return a larger tensor or a wider dtype, ops
raise an error, in eager mode and while tracing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ingot.core.errors import OpError


def check_same_dtype(op: str, **tensors: Tensor | None) -> None:
    """Require that the tensors that are not None have the same floating dtype.

    >>> check_same_dtype("linear", x=Tensor([1.0]), bias=None)
    """
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor is not None}
    if not (len(dtypes) == 1 and next(iter(dtypes)).is_floating_point):
        raise OpError(
            f"{op}: " + _listing({n: t.dtype for n, t in tensors.items() if t is not None}),
            hint="pass floating tensors of one dtype; ops do not promote",
        )


def check_same_shape(op: str, **tensors: Tensor) -> None:
    """Require that the tensors have the same shape and the same floating dtype.

    >>> check_same_shape("swiglu", gate=Tensor([1.0]), up=Tensor([2.0]))
    """
    check_same_dtype(op, **tensors)
    first, *rest = tensors.values()
    if not (all(first.shape == tensor.shape for tensor in rest)):
        raise OpError(
            f"{op}: " + _listing({n: tuple(t.shape) for n, t in tensors.items()}),
            hint="pass tensors of one shape; ops do not broadcast",
        )


def check_keys_values(op: str, q: Tensor, k: Tensor, v: Tensor, paged: bool) -> None:
    """Require that keys and values have the same shape, and the dtype of the queries, or int8 in a
    paged KV cache.

    >>> rows = Tensor([1.0]).char()
    >>> check_keys_values("attention", Tensor([1.0]), rows, rows, paged=True)
    """
    if not (paged and k.dtype == v.dtype == torch.int8):
        check_same_dtype(op, q=q, k=k, v=v)
    if k.shape != v.shape:
        raise OpError(
            f"{op}: k is {tuple(k.shape)}, v {tuple(v.shape)}",
            hint="pass keys and values of one shape",
        )


def is_integral(tensor: Tensor) -> bool:
    """Return whether a tensor holds integers. Bools count as integers.

    >>> is_integral(Tensor([3.0])), is_integral(Tensor([3.0]).int())
    (False, True)
    """
    return not (tensor.is_floating_point() or tensor.is_complex())


def _listing(facts: dict[str, object]) -> str:
    return ", ".join(f"{name} is {fact}" for name, fact in facts.items())
