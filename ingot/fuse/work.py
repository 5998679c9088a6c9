"""Counts the FLOPs and bytes of calls, from the sizes of their arguments and results.

They are those of a call on its own, without fusion: the arguments are read and the result is
written, nothing is moved by a view. FLOPs are those of matmuls, attention and convolutions. With
dynamic shapes they are those of the first call.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, fx

from ingot.fuse.graph import named_call, value_of
from ingot.ops import Cost


def total(works: Iterable[Cost]) -> Cost:
    """Return a sum.

    >>> total([Cost(flops=1, bytes=2), Cost(flops=0, bytes=3)])
    Cost(bytes=5, flops=1)
    """
    parts = list(works)
    return Cost(bytes=sum(part.bytes for part in parts), flops=sum(part.flops for part in parts))


def work_of(node: fx.Node, value: Callable[[fx.Node], Any] = value_of) -> Cost:
    """Return the work of a call; `value` returns the tensors of nodes, by default fake ones.

    >>> from ingot.fuse.graph import VALUE
    >>> graph = fx.symbolic_trace(lambda x: x @ x).graph
    >>> for node in graph.nodes:
    ...     import torch
    ...     node.meta[VALUE] = torch.ones(4, 4)
    >>> work_of(list(graph.nodes)[1])
    Cost(bytes=128, flops=128)
    """
    read = _tensors([value(source) for source in node.all_input_nodes])
    result = value(node)
    return Cost(flops=_flops(node, value, result), bytes=_bytes(read, _tensors(result)))


def size_hint(tensor: Tensor) -> int:
    """Return the number of elements of a tensor, at the sizes of the first call.

    >>> import torch
    >>> size_hint(torch.ones(2, 3))
    6
    """
    return math.prod(hint(size) for size in tensor.shape)


def hint(size: Any) -> int:
    """Return a size at the first call, without a guard on it."""
    return size if isinstance(size, int) else int(size.node.hint)


def _tensors(values: Any) -> list[Tensor]:
    """Return the tensors among values and in tuples of them."""
    if isinstance(values, tuple | list):
        return [tensor for value in values for tensor in _tensors(value)]
    return [values] if isinstance(values, Tensor) else []


def _bytes(read: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    known = {_storage(tensor) for tensor in read}
    if all(_storage(tensor) in known for tensor in written):
        return 0  # a view
    return sum(size_hint(tensor) * tensor.itemsize for tensor in (*read, *written))


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _flops(node: fx.Node, value: Callable[[fx.Node], Any], result: Any) -> int:
    call = named_call(node)
    target = getattr(node.target, "__name__", str(node.target)).strip("_")
    name, args = (target, node.args) if call is None else call
    if name not in _FLOPS or not isinstance(result, Tensor):
        return 0
    tensors = [value(arg) if isinstance(arg, fx.Node) else arg for arg in args]
    return 2 * _FLOPS[name](tensors, result)


def _matmul(args: Sequence[Tensor], result: Tensor) -> int:
    return size_hint(result) * hint(args[0].shape[-1])


def _convolution(args: Sequence[Tensor], result: Tensor) -> int:
    return size_hint(result) * size_hint(args[1]) // hint(args[1].shape[0])


# Multiply-adds by the arguments and the result of a call.
_FLOPS: dict[str, Callable[[Sequence[Any], Tensor], int]] = {
    "linear": _matmul,
    "matmul": _matmul,
    "bmm": _matmul,
    "grouped_mm": _matmul,
    "addmm": lambda args, result: _matmul(args[1:], result),
    "baddbmm": lambda args, result: _matmul(args[1:], result),
    "sdpa": lambda args, _: 2 * size_hint(args[0]) * hint(args[1].shape[-2]),
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
}
