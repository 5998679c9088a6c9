"""Times the calls of a captured graph one by one, and counts their bytes and FLOPs.

The graph runs as Dynamo captured it, without fusion: the times show where a model spends them in
eager mode.
"""

# pyright: basic
from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ingot.fuse.graph import named_call
from ingot.fuse.proof import concrete_inputs
from ingot.fuse.work import work_of

RUNS = 3
"""Timed runs, of which the shortest time of each call counts."""
_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


@dataclass(frozen=True, kw_only=True)
class CallProfile:
    """One call of a graph."""

    node: str
    """Its name in the graph."""
    name: str
    """What it calls."""
    seconds: float
    bytes: int
    flops: int
    dtype: str
    """That of its result; "" if that is not a tensor."""
    source: str
    """File and line of the model's code, "" if unknown."""
    notes: frozenset[str]
    """Facts about its arguments that `ingot.fuse.advice` looks for."""


def profile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> list[CallProfile]:
    """Run a graph a few times and return its calls, in order."""
    counted = _Counter(module)
    counted.run(*concrete_inputs(module.graph, inputs))
    for _ in range(RUNS):
        timer = _Timer(module)
        with torch.no_grad():
            timer.run(*concrete_inputs(module.graph, inputs))
        for node, seconds in timer.seconds.items():
            call = counted.calls[node]
            if seconds < call.seconds:
                counted.calls[node] = replace(call, seconds=seconds)
    return list(counted.calls.values())


class _Timer(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seconds: dict[str, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        start = time.perf_counter()
        result = super().run_node(n)
        if n.op in ("call_function", "call_method"):
            self.seconds[n.name] = time.perf_counter() - start
        return result


class _Counter(fx.Interpreter):
    """Counts what the calls do."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.calls: dict[str, CallProfile] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op not in ("call_function", "call_method"):
            return super().run_node(n)
        with torch.no_grad():
            result = super().run_node(n)
        work = work_of(n, lambda node: result if node is n else self.env[node])
        call = named_call(n)
        target = getattr(n.target, "__name__", str(n.target))
        self.calls[n.name] = CallProfile(
            node=n.name,
            name=call.name if call is not None else target,
            seconds=float("inf"),
            bytes=work.bytes,
            flops=work.flops,
            dtype=str(result.dtype).removeprefix("torch.") if isinstance(result, Tensor) else "",
            source=_source(n),
            notes=_notes(n, self.env),
        )
        return result


def _notes(node: fx.Node, env: dict[fx.Node, Any]) -> frozenset[str]:
    call, notes = named_call(node), set[str]()
    if call is not None and call.name == "sdpa" and isinstance(call.args[3], fx.Node):
        mask, q = env[call.args[3]], env[call.args[0]]
        notes |= {"dense_mask", *_mask_notes(mask, q)}
    if call is not None and call.name == "linear" and isinstance(call.args[1], fx.Node):
        notes |= set() if env[call.args[1]].is_contiguous() else {"strided_weight"}
    return frozenset(notes)


def _mask_notes(mask: Tensor, q: Tensor) -> set[str]:
    """Return whether a mask is causal or masks nothing, by its values."""
    allowed = mask if mask.dtype == torch.bool else mask == 0
    length = q.shape[-2]
    if bool(allowed.all()):
        return {"empty_mask"}
    if allowed.shape[-2:] != (length, length):
        return set()
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return {"causal_mask"} if bool((allowed == causal).all()) else set()


def _source(node: fx.Node) -> str:
    places = _LINE.findall(str(node.meta.get("stack_trace", "")))
    own = [place for place in places if "site-packages/torch/" not in place[0]]
    if not own:
        return ""
    file, line = own[-1]
    return f"{file.rpartition('/')[2]}:{line}"
