"""Causal masks in buffers of a module: known by their values, and watched afterwards.

Many models keep `tril(ones(n, n))` in a buffer. A graph gets it as an input, so only its values
show what it is. They are read when the graph is compiled. A call with another tensor, or after the
buffer was written to, runs the graph as it was captured.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ingot.core import log
from ingot.fuse.graph import mutations
from ingot.fuse.mask import EXPRESSION, expression_of

_log = log.logger(__name__)


class MaskBuffers:
    """The inputs of a graph that are causal masks, and the graph as it was captured."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> None:
        graph = module.graph
        written = {root for _, root in mutations(graph)}
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        self._known: dict[int, tuple[Tensor, int]] = {}
        for i, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
            if node in written or not _is_buffer(value):
                continue
            if (expression := expression_of(value)) is not None:
                node.meta[EXPRESSION] = expression
                self._known[i] = value, value._version
        self._warned = False
        self._captured = _copied(module) if self._known else module

    def guard(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs the captured graph instead once a mask has changed."""
        return self._run_guarded(compiled) if self._known else compiled

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
        return all(
            args[i] is buffer and buffer._version == version
            for i, (buffer, version) in self._known.items()
        )


def _is_buffer(value: Any) -> bool:
    """Return whether an input is a buffer of a module, whose values can be read and watched."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter | FakeTensor):
        return False
    kept = getattr(value, "_dynamo_static_input_type", None) is not None
    return kept and value.device.type == "cpu" and not value.is_inference()


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    return fx.GraphModule(module, graph)
