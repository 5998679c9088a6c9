"""Proves rewrites on the inputs of a model's first call.

The graph runs once as it is after the passes. Where a rewrite was made, both the calls that it
replaced and the replacement run on the values that arrive there, and the replaced calls once more
in float64. The error of the replacement against float64 may be the record's tolerance times that of
the replaced calls, as in the tests of ops (`ingot.ops.accuracy`); the same for gradients when the
model is trained. A rewrite that differs more is undone and reported.

Rewrites of one kind with the same shapes are the same functions, and are proved once. The outcome
is kept for the next process that compiles the same graph (`ingot.fuse.store`).
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from ingot.fuse import store
from ingot.fuse.graph import inputs_of, mutations, named_call, tensor_of
from ingot.fuse.rewrite import MARK, Applied, erase_dead, live_nodes, undo
from ingot.ops.accuracy import error_bound, relative_error


def prove(
    module: fx.GraphModule, applied: Iterable[Applied], inputs: Sequence[Any], training: bool
) -> None:
    """Prove the rewrites of a graph on its inputs; undo those that fail."""
    pending = list(applied)
    key = store.key_of(module.graph, pending, training)
    known = store.load(key, len(pending)) if pending else None
    for rewrite, outcome in zip(pending, known or (), strict=False):
        rewrite.error, rewrite.dropped = outcome.error, outcome.dropped
    reason = "there were no values to prove it with"
    if pending and not known and not any(isinstance(value, FakeTensor) for value in inputs):
        try:
            _Prover(module, training).prove(inputs)
            store.save(key, [_outcome(rewrite) for rewrite in pending])
        except Exception as error:  # invalid inputs: the caller's call raises the same
            reason = f"the graph raised {type(error).__name__}"
    for rewrite in reversed(pending):  # later ones first: they read outputs of earlier ones
        if rewrite.error is None and rewrite.dropped is None:
            rewrite.dropped = reason
        if rewrite.dropped is not None:
            undo(module.graph, rewrite, pending)
    erase_dead(module.graph)
    module.recompile()


def _outcome(rewrite: Applied) -> store.Outcome:
    error = rewrite.error
    finite = error if error is not None and math.isfinite(error) else None
    return store.Outcome(finite, rewrite.dropped)


class _Prover(fx.Interpreter):
    """Runs a graph, and proves each rewrite when its result is reached."""

    def __init__(self, module: fx.GraphModule, training: bool) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.module_graph = module.graph
        self.training = training
        self.proved: dict[Any, Applied] = {}
        self.last_uses = _last_uses(module.graph)
        self.needed = {node for nodes in self.last_uses.values() for node in nodes}

    def prove(self, inputs: Sequence[Any]) -> None:
        """Run the graph on copies of what it would mutate, without other effects."""
        values = concrete_inputs(self.module_graph, inputs)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            self.run(*values)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; before it, prove the rewrite whose result it is."""
        if n not in self.needed:  # replaced calls, which the proofs run
            return None
        if isinstance(applied := n.meta.get(MARK), Applied):
            self._prove(applied, [self.env[node] for node in applied.inputs])
        result = super().run_node(n)
        for node in self.last_uses[n]:
            self.env.pop(node, None)
        return result

    def _prove(self, applied: Applied, values: list[Any]) -> None:
        key = _key(applied, values)
        same = self.proved.setdefault(key, applied)
        if same is applied:
            needs = [
                self.training and (t := tensor_of(node)) is not None and t.requires_grad
                for node in applied.inputs
            ]
            try:
                applied.error = worst_error(applied, values, needs)
            except Exception as error:  # whatever a replacement raises, it is not used
                applied.dropped = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                return
            if not applied.error <= 1:
                applied.dropped = f"its error is {applied.error:.3g} times the bound"
        applied.error, applied.dropped = same.error, same.dropped


def concrete_inputs(graph: fx.Graph, inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs to run a graph on: sizes as numbers, copies of what it mutates."""
    mutated = {root for _, root in mutations(graph)}
    placeholders = (node for node in graph.nodes if node.op == "placeholder")
    values = [_concrete(value) for value in inputs]
    return [
        value.clone() if node in mutated and isinstance(value, Tensor) else value
        for node, value in zip(placeholders, values, strict=True)
    ]


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return which values are not needed after each node; inputs of rewrites are needed there."""
    live, seen = live_nodes(graph), set[fx.Node]()
    found: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        found[node] = []
        if node in live or node in seen:
            mark = node.meta.get(MARK)
            proved = mark.inputs if isinstance(mark, Applied) else ()
            found[node] = [n for n in (*inputs_of(node), *proved) if n not in seen]
            if node not in seen:
                found[node].append(node)
            found[node] = list(dict.fromkeys(found[node]))
            seen.update(found[node])
    return found


def worst_error(applied: Applied, values: Sequence[Any], needs: Sequence[bool]) -> float:
    """Return the largest error of a replacement, divided by its bound: at most 1 if it is proved.

    `needs` says of which inputs the gradients are compared too.
    """
    tolerance = applied.rewrite.op.tolerance
    wide = [_to_float64(value) for value in values]
    functions = _Float64(applied.before).run, applied.before, applied.after
    inputs = wide, values, values
    truth, plain, new = (list(f(*v)) for f, v in zip(functions, inputs, strict=True))
    errors = _ratios(truth, plain, new, tolerance.forward, by_row=True)
    if any(needs):
        cotangents = [_random_like(value) for value in new]
        truth, plain, new = (
            _gradients(f, v, needs, cotangents) for f, v in zip(functions, inputs, strict=True)
        )
        errors += _ratios(truth, plain, new, tolerance.backward, by_row=False)
    return max(errors)


def _ratios(
    truth: list[Tensor], plain: list[Tensor], new: list[Tensor], factor: float, by_row: bool
) -> list[float]:
    ratios: list[float] = []
    for t, p, n in zip(truth, plain, new, strict=True):
        if n.shape != p.shape or n.dtype != p.dtype:
            return [torch.inf]
        bound = error_bound(n, relative_error(p, t, by_row), factor)
        ratios.append(relative_error(n, t, by_row) / bound)
    return ratios


def _gradients(
    function: Callable[..., Any],
    values: Sequence[Any],
    needs: Sequence[bool],
    cotangents: Sequence[Tensor],
) -> list[Tensor]:
    with torch.enable_grad():
        leaves = [
            value.detach().requires_grad_() if needed else value
            for value, needed in zip(values, needs, strict=True)
        ]
        outputs = function(*leaves)
        wanted = [leaf for leaf, needed in zip(leaves, needs, strict=True) if needed]
        pairs = [
            (out, c.to(out.dtype))
            for out, c in zip(outputs, cotangents, strict=True)
            if out.requires_grad
        ]
        found = torch.autograd.grad(
            [out for out, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True
        )
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for leaf, grad in zip(wanted, found, strict=True)
    ]


class _Float64(fx.Interpreter):
    """Runs a graph without its casts between floating dtypes.

    PyTorch's `grouped_mm` has no float64: it is computed group by group.
    """

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, or return the input of a cast."""
        call = named_call(n)
        if call is not None and call.name == "to" and isinstance(call.args[0], fx.Node):
            value, result = self.env[call.args[0]], tensor_of(n)
            floating = isinstance(value, Tensor) and value.is_floating_point()
            if floating and result is not None and result.is_floating_point():
                return value
        if call is not None and call.name == "grouped_mm":
            x, weight, ends = (self.env[node] for node in call.args[:3])
            starts = torch.cat([ends.new_zeros(1), ends])
            parts = [x[a:b] @ weight[i] for i, (a, b) in enumerate(pairwise(starts.tolist()))]
            return torch.cat([*parts, x.new_zeros(len(x) - int(ends[-1]), weight.shape[-1])])
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of tensors without a floating dtype that it is given."""
        return super().call_function(target, args, _without_cast(args, kwargs))

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of tensors without a floating dtype that it is given."""
        return super().call_method(target, args, _without_cast(args, kwargs))


def _without_cast(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    dtype = kwargs.get("dtype")
    casts = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    of_tensor = bool(args) and isinstance(args[0], Tensor)
    return {k: v for k, v in kwargs.items() if k != "dtype"} if casts and of_tensor else kwargs


def _to_float64(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if floating else value


def _random_like(value: Tensor) -> Tensor:
    generator = torch.Generator(value.device).manual_seed(0)
    return torch.randn(value.shape, generator=generator, dtype=torch.float64, device=value.device)


def _concrete(value: Any) -> Any:
    """Return an input as the calls take it: the number of a symbol, a tensor without gradient."""
    if isinstance(value, torch.SymInt | torch.SymFloat):
        return value.node.hint  # not int(): that would fix the size in the compiled graph
    return value.detach() if isinstance(value, Tensor) else value


def _key(applied: Applied, values: Sequence[Any]) -> Any:
    """Return what identifies the function and the shapes of a rewrite."""
    described = tuple(
        (tuple(v.shape), v.stride(), v.dtype) if isinstance(v, Tensor) else v for v in values
    )
    return applied.rewrite.name, applied.before.code, applied.after.code, described
