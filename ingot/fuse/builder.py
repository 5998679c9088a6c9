"""Adds calls to a graph, with the fake values that later passes look at."""

# pyright: basic
from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from ingot import ops
from ingot.fuse.graph import VALUE, same_value, value_of


class Builder:
    """Adds the calls of a replacement at one place of a graph.

    A call that was added before with the same arguments is used again: all layers of a model share
    the same `cu_seqlens`.
    """

    def __init__(self, graph: fx.Graph, known: dict[Any, fx.Node] | None = None) -> None:
        self.graph = graph
        self.added: list[fx.Node] = []
        self._known: dict[Any, fx.Node] = {} if known is None else known

    def op(self, record: ops.Op[..., Any], *args: Any) -> fx.Node:
        """Call an op."""
        return self._add("call_function", record.overload, args)

    def function(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Call a function."""
        return self._add("call_function", target, args, kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Call a method of a tensor."""
        return self._add("call_method", name, args, kwargs)

    def item(self, outputs: fx.Node, index: int) -> fx.Node:
        """Select one of the outputs of a call."""
        return self._add("call_function", operator.getitem, (outputs, index))

    def size(self, tensor: fx.Node, dim: int) -> Any:
        """Return a size as a constant if it is one, as a call if it is dynamic."""
        value = value_of(tensor)
        size = value.shape[dim] if isinstance(value, Tensor) else None
        return size if isinstance(size, int) else self.method("size", tensor, dim)

    def packed(self, x_BNLH: fx.Node) -> fx.Node:
        """Return the heads of a padded batch as packed tokens, (T, N, H)."""
        return self.method("flatten", self.method("transpose", x_BNLH, 1, 2), 0, 1)

    def unpacked(self, x_TNH: fx.Node, batch: Any, length: Any) -> fx.Node:
        """Return packed tokens as the heads of a batch, (B, N, L, H)."""
        x_BLNH = self.method("unflatten", x_TNH, 0, (batch, length))
        return self.method("transpose", x_BLNH, 1, 2)

    def cu_seqlens(self, batch: Any, length: Any) -> fx.Node:
        """Return the starts of sequences of one length."""
        count = batch + 1 if isinstance(batch, int) else self.function(operator.add, batch, 1)
        numbers = self.function(torch.arange, count, dtype=torch.int32)
        return self.function(operator.mul, numbers, length)

    def _add(
        self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> fx.Node:
        key = (kind, target, repr(args), repr(kwargs))
        cheap = target in (torch.arange, operator.add, operator.mul, "size")
        if cheap and key in self._known:
            return self._known[key]
        node = self.graph.create_node(kind, target, args, kwargs or {})
        node.meta[VALUE] = compute_value(node)
        self._known[key] = node
        self.added.append(node)
        return node


def compute_value(node: fx.Node) -> Any:
    """Compute the fake value of a call from those of its arguments."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


__all__ = ["Builder", "compute_value", "same_value"]
