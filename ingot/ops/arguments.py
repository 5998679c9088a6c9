"""Helpers for the arguments and outputs of ops: tensors in lists, dtypes, outputs."""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


def tensors(args: Iterable[Any]) -> tuple[Tensor, ...]:
    """Return the tensors among arguments, including those in lists.

    >>> len(tensors((torch.zeros(1), None, [torch.zeros(1), torch.zeros(2)])))
    3
    """
    lists = (arg if isinstance(arg, list | tuple) else [arg] for arg in args)
    return tuple(value for values in lists for value in values if isinstance(value, Tensor))


def map_tensors(function: Callable[[Any], Any], arg: Any) -> Any:
    """Apply a function to an argument, or to each element if the argument is a list.

    >>> map_tensors(abs, [-1, 2]), map_tensors(abs, -3)
    ([1, 2], 3)
    """
    return [function(value) for value in arg] if isinstance(arg, list | tuple) else function(arg)


def as_tuple(value: Tensor | Iterable[Tensor] | None) -> tuple[Tensor, ...]:
    """Return the outputs of an op as a tuple; empty if the op only writes into its arguments.

    >>> as_tuple(None), len(as_tuple(torch.zeros(2))), len(as_tuple([torch.zeros(1)] * 3))
    ((), 1, 3)
    """
    if value is None:
        return ()
    return (value,) if isinstance(value, Tensor) else tuple(value)


def accum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic: float32, or float64 for float64 inputs.

    >>> accum_dtype(torch.bfloat16), accum_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


def widen(value: Any) -> Any:
    """Convert a floating-point tensor to the dtype of the arithmetic; return the rest unchanged.

    >>> widen(torch.zeros(1, dtype=torch.bfloat16)).dtype, widen(3)
    (torch.float32, 3)
    """
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(accum_dtype(value.dtype))
    return value


def allocate_like(x: Tensor) -> Tensor:
    """Allocate a contiguous tensor of the same shape, dtype and device, whatever the strides of x.

    >>> allocate_like(torch.zeros(2, 3).T).is_contiguous()
    True
    """
    return x.new_empty(x.shape)


def fake_like(x: Tensor, *_: object) -> Tensor:
    """Allocate the output of an op whose output looks like its first argument.

    >>> fake_like(torch.zeros(2, 3), 1.0).shape
    torch.Size([2, 3])
    """
    return allocate_like(x)


def copy_outputs(outputs: Any, results: Any) -> Any:
    """Round results into the allocated outputs and return these.

    >>> copy_outputs(torch.empty(1, dtype=torch.bfloat16), torch.ones(1))
    tensor([1.], dtype=torch.bfloat16)
    """
    for out, result in zip(as_tuple(outputs), as_tuple(results), strict=True):
        assert out.shape == result.shape, f"fake returns {out.shape}, reference {result.shape}"
        out.copy_(result)
    return outputs
