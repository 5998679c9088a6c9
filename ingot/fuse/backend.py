"""The backend of `torch.compile`: rewrites a graph to ops and gives what is left to Inductor.

    model = torch.compile(model, backend="ingot")

Dynamo calls the backend with the graph of a model and the inputs of its first call. The passes run
on that graph, each rewrite is proved on those inputs, and Inductor compiles the result in one
graph, forward and backward: ingot's ops bring their gradients along.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ingot.fuse import cost
from ingot.fuse.buffer import MaskBuffers
from ingot.fuse.passes import PASSES, Rewrite
from ingot.fuse.proof import prove
from ingot.fuse.report import FusionReport, GraphReport, recent, record, summarize
from ingot.fuse.rewrite import is_call, live_nodes, run_passes
from ingot.fuse.work import work_of


def compile_graph(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    freeze: bool = False,
    always: bool = False,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo: the function that `backend="ingot"` names."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    masks = MaskBuffers(graph_module, example_inputs)
    record(rewrite_graph(graph_module, example_inputs, always=always))
    with config.patch(freezing=freeze):
        compiled: Any = compile_fx(graph_module, list(example_inputs))
    return masks.guard(compiled)


def rewrite_graph(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    passes: Iterable[Rewrite] = PASSES,
    always: bool = False,
) -> GraphReport:
    """Run the passes over a graph, in place, and prove them.

    A rewrite is made where it is predicted to pay, or `always`.
    """
    tensors = [value for value in example_inputs if isinstance(value, Tensor)]
    training = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    graph = graph_module.graph
    work = {node.name: work_of(node) for node in live_nodes(graph) if is_call(node)}
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return summarize([], [], graph, work)  # not measured on a GPU
    predict = None if always else partial(cost.predict, training=training)
    applied, skipped = run_passes(graph, passes, predict)
    prove(graph_module, applied, example_inputs, training)
    return summarize(applied, skipped, graph, work)


class Optimized:
    """A model that `optimize` compiled: called like the model itself.

    `report` says what was rewritten, and grows when another input leads to another graph.
    """

    def __init__(self, model: Callable[..., Any], freeze: bool = False) -> None:
        self.report = FusionReport()
        self.model = model
        self.freeze = freeze
        self._compiled = torch.compile(model, backend=self._compile)

    def _compile(self, graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compiled = compile_graph(graph_module, inputs, self.freeze)
        self.report.graphs.append(recent()[-1])
        return compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled model."""
        if not self.freeze:
            return self._compiled(*args, **kwargs)
        from torch._inductor import config

        with config.patch(freezing=True):  # Dynamo reads it too: weights become constants
            return self._compiled(*args, **kwargs)


def optimize(
    model: Callable[..., Any],
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    freeze: bool = False,
) -> Optimized:
    """Compile a model for inputs like these, and run it on them once.

    `example_inputs` is the argument, the positional arguments, or the keyword arguments by name.
    Batch and length (the first two dimensions of integer tensors, the first one of others) may
    differ in later calls. Gradients are those of the model, if they are enabled now.

    With `freeze`, and without gradients, Inductor may pack the weights as they are now: do not
    change them later.

    >>> import ingot
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    >>> fast = ingot.optimize(model, torch.ones(2, 8))  # doctest: +SKIP
    >>> print(fast.report)  # doctest: +SKIP
    graph 0: 100% of FLOPs and 100% of bytes in ingot's kernels, 0 calls left to Inductor
        1 x linear          float32 2x8                  error 0.25 of the bound
    """
    args, kwargs = as_arguments(example_inputs)
    for value in (*args, *kwargs.values()):
        for dim in dynamic_dims(value):
            torch._dynamo.maybe_mark_dynamic(value, dim)
    optimized = Optimized(model, freeze)
    optimized(*args, **kwargs)
    return optimized


def as_arguments(
    example_inputs: Tensor | Sequence[Any] | Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments that example inputs stand for."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return ((example_inputs,) if isinstance(example_inputs, Tensor) else tuple(example_inputs)), {}


def dynamic_dims(value: Any) -> list[int]:
    """Return the dimensions that may differ in later calls: batch, and length of integer tensors.

    torch specializes for sizes of 1 in any case.

    >>> dynamic_dims(torch.ones(3, 4)), dynamic_dims(torch.ones(3, 4, dtype=int))
    ([0], [0, 1])
    """
    if not isinstance(value, Tensor):
        return []
    dims = range(min(value.dim(), 1 if value.is_floating_point() else 2))
    return [dim for dim in dims if value.shape[dim] > 1]
