"""Causal masks in buffers of a module: known by their values, and watched afterwards.

Many models keep `tril(ones(n, n))` in a buffer. A graph gets it as an input, or with freezing as an
attribute, so only its values show what it is. They are read when the graph is compiled. A call with
another tensor, or after the buffer was written to, runs the graph as it was captured.
"""

# pyright: basic
from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ingot.core import log
from ingot.fuse.graph import mutations
from ingot.fuse.mask import EXPRESSION, expression_of

_log = log.logger(__name__)


class MaskBuffers:
    """The buffers of a graph that are causal masks, and the graph as it was captured."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        written = {root for _, root in mutations(module.graph)}
        self._versions: list[tuple[Tensor, int]] = []
        self._inputs: dict[int, Tensor] = {}
        for node, value, i in _buffers(module, inputs):
            expression = None if node in written else expression_of(value)
            if expression is None:
                continue
            node.meta[EXPRESSION] = expression
            self._versions.append((value, value._version))
            if i is not None:
                self._inputs[i] = value
        self._warned = False
        self._captured = _copied(module) if self._versions else module

    def guard(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs the captured graph instead once a mask has changed."""
        return self._run_guarded(compiled) if self._versions else compiled

    def _run_guarded(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if self._unchanged(args):
                return compiled(*args)
            if not self._warned:
                _log.warning("a mask in a buffer has changed: the model runs uncompiled")
            self._warned = True
            return self._captured(*args)

        return run

    def _unchanged(self, args: Sequence[Any]) -> bool:
        same = all(args[i] is buffer for i, buffer in self._inputs.items())
        return same and all(buffer._version == version for buffer, version in self._versions)


def _buffers(
    module: fx.GraphModule, inputs: Sequence[Any]
) -> Iterator[tuple[fx.Node, Tensor, int | None]]:
    """Yield each buffer with its node, and the index of the input it is, if it is one."""
    remaining = enumerate(inputs)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            i, value = next(remaining)
            if _can_watch(value) and getattr(value, "_dynamo_static_input_type", None) is not None:
                yield node, value, i
        elif node.op == "get_attr":
            value = operator.attrgetter(node.target)(module)
            if _can_watch(value):
                yield node, value, None


def _can_watch(value: Any) -> bool:
    """Return whether a value is a tensor that can be read, and that counts its changes."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter | FakeTensor):
        return False
    return value.device.type == "cpu" and not value.is_inference()


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)
