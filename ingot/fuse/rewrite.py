"""Runs the passes over a graph, and keeps for each rewrite the calls that it replaced."""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ingot.core.errors import IngotError
from ingot.fuse.builder import Builder, compute_value
from ingot.fuse.cost import Prediction
from ingot.fuse.graph import (
    VALUE,
    GraphSpec,
    grad_regions,
    inputs_of,
    mutated_by,
    mutations,
    named_call,
    same_value,
    storage_roots,
    tensor_of,
    value_of,
)
from ingot.fuse.passes import Rewrite
from ingot.fuse.pattern import Match, find

MARK = "rewrite"
"""Where the first new node of a rewrite keeps its `Applied`."""
# Calls that must not be computed twice: their results may not be needed outside a match.
_EXPENSIVE = frozenset(
    ["linear", "addmm", "matmul", "grouped_mm", "sdpa", "softmax", "embedding", "conv1d", "conv2d"]
)


@dataclass(kw_only=True, eq=False)
class Applied:
    """A rewrite of a graph. `before` and `after` compute the same outputs from the same inputs."""

    rewrite: Rewrite
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    before: fx.GraphModule
    after: fx.GraphModule
    description: str
    """Shape and dtype of the result."""
    replaced: tuple[str, ...]
    """Names of the calls that it replaced."""
    predicted: Prediction | None = None
    error: float | None = None
    """Largest error divided by its bound, once it was proved."""
    dropped: str | None = None
    """Why it was undone."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A match that was left as it was."""

    name: str
    reason: str


# The predicted times of a rewrite, and of what it replaces; None where it always pays.
Predict = Callable[[Rewrite, Match], Prediction | None]


def run_passes(
    graph: fx.Graph, passes: Iterable[Rewrite], predict: Predict | None = None
) -> tuple[list[Applied], list[Skipped]]:
    """Run the passes over a graph of Dynamo, checking its specification after each."""
    applied: list[Applied] = []
    skipped: list[Skipped] = []
    spec = GraphSpec.of(graph)
    for rewrite in passes:
        matches = find_matches(graph, rewrite)
        if matches:
            _Pass(graph, rewrite, predict, applied, skipped).run(matches)
            spec.check(graph, rewrite.name)
    return applied, skipped


def find_matches(graph: fx.Graph, rewrite: Rewrite) -> list[tuple[fx.Node, Match]]:
    """Return matches that share no expensive call, in the order of the graph."""
    taken: set[fx.Node] = set()
    found: list[tuple[fx.Node, Match]] = []
    regions, roots = grad_regions(graph), storage_roots(graph)
    written = {root for _, root in mutations(graph)}
    live = live_nodes(graph)
    for node in reversed(graph.nodes):  # later ones first: they contain earlier ones
        if named_call(node) is None or node in taken or node not in live:
            continue
        for match in find(rewrite.pattern, node):
            match = replace(match, args={**match.args, "root": node})
            nodes = {*match.inside, *_nodes(match.args.values())}
            if (
                _reads_no_inner_value(match, rewrite)
                and taken.isdisjoint(_expensive(match.inside))
                and not any(roots[n] in written for n in nodes)
                and _in_one_region(node, match, regions)
                and _results_suffice(node, match, rewrite, live)
                and rewrite.condition(match)
            ):
                inside = set(match.inside)
                taken |= _expensive(inside) | {n for n in inside if _users(n, live) <= inside}
                found.append((node, match))
                break
    return found[::-1]


def _reads_no_inner_value(match: Match, rewrite: Rewrite) -> bool:
    """Return whether no argument is computed inside the match, which another form may avoid."""
    results = {"root", *rewrite.outputs}
    read = _nodes(value for name, value in match.args.items() if name not in results)
    return set(match.inside).isdisjoint(read)


def _nodes(values: Iterable[Any]) -> list[fx.Node]:
    return [value for value in values if isinstance(value, fx.Node)]


def _expensive(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    return {n for n in nodes if (call := named_call(n)) and call.name in _EXPENSIVE}


def _in_one_region(root: fx.Node, match: Match, regions: dict[fx.Node, int]) -> bool:
    """Return whether the calls run in one grad mode, except those that have no gradient anyway."""

    def has_gradient(node: fx.Node) -> bool:
        tensors = (tensor_of(source) for source in inputs_of(node))
        return any(t is not None and t.requires_grad for t in tensors)

    return all(regions[n] == regions[root] or not has_gradient(n) for n in match.inside)


def live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes whose results or effects are needed.

    Replaced calls stay in the graph until the proof has run them.
    """
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        needed = any(user in live for user in node.users) or not is_call(node)
        if needed or mutated_by(node):
            live.add(node)
    return live


def _users(node: fx.Node, live: set[fx.Node]) -> set[fx.Node]:
    return {user for user in node.users if user in live}


def _results_suffice(root: fx.Node, match: Match, rewrite: Rewrite, live: set[fx.Node]) -> bool:
    """Return whether no expensive call inside, or what is computed from it, is needed outside."""
    results = {root, *(match[name] for name in rewrite.outputs)}
    inside, expensive = set(match.inside), _expensive(match.inside)
    pending = list(expensive - results)
    followed = set(pending)
    while pending:
        users = _users(pending.pop(), live)
        if not users <= inside:
            return False
        pending += users - results - followed
        followed |= users
    return True


class _Pass:
    """One pass over a graph."""

    def __init__(
        self,
        graph: fx.Graph,
        rewrite: Rewrite,
        predict: Predict | None,
        applied: list[Applied],
        skipped: list[Skipped],
    ) -> None:
        self.graph, self.rewrite, self.predict = graph, rewrite, predict
        self.applied, self.skipped = applied, skipped
        self.replaced: dict[fx.Node, fx.Node] = {}
        self.shared: dict[Any, fx.Node] = {}

    def run(self, matches: Sequence[tuple[fx.Node, Match]]) -> None:
        """Replace the matches, in order."""
        for root, match in matches:
            args = {name: self._current(value) for name, value in match.args.items()}
            try:
                reason = self._replace(root, replace(match, args={**args, "root": root}))
            except (IngotError, RuntimeError, TypeError, ValueError) as error:
                reason = str(error).splitlines()[0]
            if reason is not None:
                self.skipped.append(Skipped(name=self.rewrite.name, reason=reason))

    def _current(self, value: Any) -> Any:
        while isinstance(value, fx.Node) and value in self.replaced:
            value = self.replaced[value]
        return value

    def _replace(self, root: fx.Node, match: Match) -> str | None:
        """Replace one match; return the reason if that is not possible or does not pay."""
        predicted = self.predict(self.rewrite, match) if self.predict else None
        if predicted is not None and not predicted.pays:
            return "predicted to be slower"
        old = (root, *(match[name] for name in self.rewrite.outputs))
        order = {node: i for i, node in enumerate(self.graph.nodes)}
        inside = sorted(match.inside, key=order.__getitem__)
        inputs = _inputs(inside, match)
        users = {user for node in old for user in _users(node, live_nodes(self.graph))}
        place = min(users - set(inside), key=order.__getitem__)
        place = min(place, root, key=order.__getitem__)
        at = order[place]
        if any(order[node] >= at for node in inputs):
            return "a result is needed before the inputs are known"
        with computing_values(self.graph):
            before = _copy(inside, inputs, old)
            after = _build(self.rewrite, match, inputs)
        for new, result in zip(_results(after.graph), old, strict=True):
            if not same_value(value_of(new), value_of(result)):
                return f"the replacement has another shape or dtype: {_describe(new)}"
        if any(new.op == "placeholder" for new in _results(after.graph)):
            return "the replacement returns one of its inputs"
        with self.graph.inserting_before(place), computing_values(self.graph):
            outputs = splice(self.graph, after.graph, inputs, self.shared)
        applied = Applied(
            rewrite=self.rewrite,
            inputs=tuple(inputs),
            outputs=outputs,
            before=before,
            after=after,
            description=_describe(root),
            replaced=tuple(node.name for node in inside),
            predicted=predicted,
        )
        for result, new in zip(old, outputs, strict=True):
            new.meta = {**new.meta, VALUE: value_of(result)}
            self.replaced[result] = new
            # Replaced calls before this place keep the old value.
            result.replace_all_uses_with(new, lambda user: order.get(user, at) >= at)
            for earlier in self.applied:
                earlier.inputs = tuple(new if node is result else node for node in earlier.inputs)
        outputs[0].meta[MARK] = applied
        self.applied.append(applied)
        return None


def _inputs(inside: Sequence[fx.Node], match: Match) -> list[fx.Node]:
    """Return what the calls of a match and its replacement read."""
    read = [node for call in inside for node in inputs_of(call)] + _nodes(match.args.values())
    return [node for node in dict.fromkeys(read) if node not in set(inside)]


def _copy(
    inside: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return the calls of a match as a graph of its own, in the same words for equal calls."""
    graph, mapped = _with_inputs(inputs)
    for i, node in enumerate(inside):
        args, kwargs = map_arg((node.args, node.kwargs), mapped.__getitem__)
        mapped[node] = graph.create_node(node.op, node.target, args, kwargs, name=f"call_{i}")
        mapped[node].meta = dict(node.meta)
    graph.output(tuple(mapped[node] for node in outputs))
    return fx.GraphModule({}, graph)


def _build(rewrite: Rewrite, match: Match, inputs: Sequence[fx.Node]) -> fx.GraphModule:
    """Return the replacement of a match as a graph of its own."""
    graph, mapped = _with_inputs(inputs)
    args = {
        name: mapped.get(v, v) if isinstance(v, fx.Node) else v for name, v in match.args.items()
    }
    outputs = rewrite.build(Builder(graph), replace(match, args=args))
    graph.output(outputs)
    return fx.GraphModule({}, graph)


def _with_inputs(inputs: Sequence[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    graph, mapped = fx.Graph(), dict[fx.Node, fx.Node]()
    for i, node in enumerate(inputs):
        mapped[node] = graph.placeholder(f"input_{i}")
        mapped[node].meta[VALUE] = value_of(node)
    return graph, mapped


def _results(graph: fx.Graph) -> tuple[fx.Node, ...]:
    output = next(iter(reversed(graph.nodes)))
    return tuple(output.args[0])  # pyright: ignore


def splice(
    graph: fx.Graph, part: fx.Graph, inputs: Sequence[fx.Node], shared: dict[Any, fx.Node]
) -> tuple[fx.Node, ...]:
    """Insert the calls of `part` into a graph; return its outputs there.

    Equal calls without a gradient, such as those that make `cu_seqlens` of a batch, are `shared` by
    later insertions; equal matmuls are not, since one of them may be without gradient on purpose.
    """
    mapped: dict[fx.Node, fx.Node] = {}
    rest = iter(inputs)
    for node in part.nodes:
        if node.op == "placeholder":
            mapped[node] = next(rest)
        elif node.op != "output":
            args, kwargs = map_arg((node.args, node.kwargs), mapped.__getitem__)
            key = (node.op, node.target, repr(args), repr(kwargs))
            if node.target == "size":  # of any tensor: they are equal
                key = (node.op, node.target, str(value_of(node)))
            mapped[node] = shared.get(key) or graph.create_node(node.op, node.target, args, kwargs)
            if VALUE not in mapped[node].meta:
                mapped[node].meta[VALUE] = compute_value(mapped[node])
            if not _has_gradient(mapped[node]):
                shared[key] = mapped[node]
    return tuple(mapped[node] for node in _results(part))


def _has_gradient(node: fx.Node) -> bool:
    value = value_of(node)
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return not isinstance(value, int | torch.SymInt)


def undo(graph: fx.Graph, applied: Applied, others: Iterable[Applied] = ()) -> None:
    """Put back the calls that a rewrite replaced; `others` may read their results."""
    first = min(applied.outputs, key={n: i for i, n in enumerate(graph.nodes)}.__getitem__)
    with graph.inserting_before(first), computing_values(graph):
        old = splice(graph, applied.before.graph, applied.inputs, {})
    for new, result in zip(applied.outputs, old, strict=True):
        new.replace_all_uses_with(result)
        for other in others:
            other.inputs = tuple(result if node is new else node for node in other.inputs)


def erase_dead(graph: fx.Graph) -> None:
    """Erase the calls whose results and effects are not needed."""
    live = live_nodes(graph)
    for node in reversed(graph.nodes):
        if node not in live:
            graph.erase_node(node)


def is_call(node: fx.Node) -> bool:
    """Return whether a node only computes tensors; `mutated_by` knows its other effects."""
    value = value_of(node)
    tensors = value if isinstance(value, tuple) else (value,)
    computes = all(isinstance(tensor, Tensor) for tensor in tensors)
    return computes and node.op in ("call_function", "call_method")


def _describe(node: fx.Node) -> str:
    value = value_of(node)
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {'x'.join(map(str, value.shape)) or '1'}"


@contextmanager
def computing_values(graph: fx.Graph) -> Generator[None]:
    """Compute the fake values of new calls of a graph."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_tensor import FakeTensor

    values = (node.meta.get(VALUE) for node in graph.nodes)
    mode = next((v.fake_mode for v in values if isinstance(v, FakeTensor)), nullcontext())
    # Without torch's Python dispatcher, `F.pad` replaces dynamic sizes by those of the first call.
    with mode, torch.no_grad(), enable_python_dispatcher():
        yield
