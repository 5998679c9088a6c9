"""The graph that Dynamo captures: its calls under one name, and what they alias and mutate.

Passes run on Dynamo's torch-level graph, before AOTAutograd. There a linear layer is still one
call, but models spell the same computation as a function, an operator or a method. `named_call`
gives each spelling one name and its arguments in one order, so that a pattern is written once.

`GraphSpec` holds what no pass may change: the shapes and dtypes of the outputs, which inputs they
alias, and which values the graph mutates, in order.
"""

# pyright: basic
from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ingot.core.errors import IngotError

VALUE = "example_value"
"""Where Dynamo keeps the fake value of a node."""


class GraphError(IngotError):
    """A pass changed what the graph computes for its caller."""


class NamedCall(NamedTuple):
    """A call under its common name, with all arguments in the order of its signature."""

    name: str
    args: tuple[Any, ...]


_CONV: tuple[str, dict[str, Any]] = (
    "input weight",
    {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1},
)
# Parameters of calls that may be spelled with keywords; the others have positional ones only.
_SIGNATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("input weight", {"bias": None}),
    "addmm": ("input mat1 mat2", {"beta": 1, "alpha": 1}),
    "layer_norm": ("input shape", {"weight": None, "bias": None, "eps": 1e-5}),
    "rms_norm": ("input shape", {"weight": None, "eps": None}),
    "embedding": (
        "input weight",
        {
            "padding_idx": None,
            "max_norm": None,
            "norm_type": 2.0,
            "scale_grad_by_freq": False,
            "sparse": False,
        },
    ),
    "dropout": ("input", {"p": 0.5, "training": True, "inplace": False}),
    "gelu": ("input", {"approximate": "none"}),
    "silu": ("input", {"inplace": False}),
    "relu": ("input", {"inplace": False}),
    "sdpa": (
        "query key value",
        {
            "attn_mask": None,
            "dropout_p": 0.0,
            "is_causal": False,
            "scale": None,
            "enable_gqa": False,
        },
    ),
    "conv1d": _CONV,
    "conv2d": _CONV,
    "batch_norm": (
        "input running_mean running_var",
        {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5},
    ),
    "mean": ("input", {"dim": None, "keepdim": False, "dtype": None}),
    "softmax": ("input", {"dim": None, "_stacklevel": 3, "dtype": None}),
    "cat": ("tensors", {"dim": 0}),
    "transpose": ("input dim0 dim1", {}),
    "unsqueeze": ("input dim", {}),
    "pow": ("input exponent", {}),
    "to": ("input", {}),
    "cross_entropy": (
        "input target",
        {
            "weight": None,
            "size_average": None,
            "ignore_index": -100,
            "reduce": None,
            "reduction": "mean",
            "label_smoothing": 0.0,
        },
    ),
    "diff": ("input", {"n": 1, "dim": -1, "prepend": None, "append": None}),
    "cumsum": ("input dim", {"dtype": None}),
    "contiguous": ("input", {"memory_format": torch.contiguous_format}),
    "tril": ("input", {"diagonal": 0}),
    "triu": ("input", {"diagonal": 0}),
    "masked_fill": ("input mask value", {}),
    "where": ("condition input other", {}),
    "grouped_mm": ("input weight", {"offs": None, "bias": None, "out_dtype": None}),
    "arange": ("start", {"end": None, "step": 1, "dtype": None, "device": None}),
}

# fmt: off
_NAMES = [
    "add", "sub", "mul", "div", "pow", "neg", "mean", "rsqrt", "tanh", "sigmoid", "relu", "silu",
    "gelu", "softmax", "matmul", "view", "reshape", "transpose", "expand", "unsqueeze",
    "contiguous", "to", "flatten", "cat", "cos", "sin", "square", "sqrt", "le", "lt",
    "ge", "gt", "eq", "ne", "cumsum", "diff", "arange", "linear", "addmm", "layer_norm",
    "rms_norm", "embedding", "dropout", "cross_entropy", "getitem", "repeat",
    "conv1d", "conv2d", "tril", "triu", "masked_fill", "where", "invert",
]
# fmt: on
_OTHER_FUNCTIONS: dict[Any, str] = {
    F.scaled_dot_product_attention: "sdpa",
    F.batch_norm: "batch_norm",
    operator.truediv: "div",
    torch.true_divide: "div",
    operator.and_: "and",
    torch.logical_and: "and",
    torch.bitwise_and: "and",
    torch.logical_not: "invert",
    torch.bitwise_not: "invert",
    F.grouped_mm: "grouped_mm",
    getattr(torch, "_grouped_mm"): "grouped_mm",  # noqa: B009
}
_OTHER_OPS = {"transformers.grouped_mm_fallback": "grouped_mm"}
_METHODS = (
    {name: name for name in _NAMES}
    | {
        "__and__": "and",
        "__invert__": "invert",
        "logical_not": "invert",
        "bitwise_not": "invert",
        "new_ones": "new_ones",
    }
    | dict.fromkeys(["bool", "float", "double", "half", "bfloat16", "int", "long", "type"], "to")
)
# Calls that return one number everywhere; None for those that are given it.
_FILLED = {
    "ones": 1,
    "ones_like": 1,
    "new_ones": 1,
    "zeros": 0,
    "zeros_like": 0,
    "full": None,
    "tensor": None,
}
_VARIADIC = {"view", "reshape", "expand", "repeat"}
_VIEWS = (_VARIADIC - {"repeat"}) | {
    "transpose",
    "unsqueeze",
    "contiguous",
    "to",
    "flatten",
    "getitem",
}
_VIEW_METHODS = {
    "t",
    "permute",
    "squeeze",
    "split",
    "chunk",
    "unbind",
    "narrow",
    "select",
    "detach",
}
# The calls that `named_call` names create new tensors or views and have no effect: only those may
# be inside a rewrite.


@cache
def _functions() -> dict[Any, str]:
    """Return the common name of each function, from every module that has it."""
    modules = (operator, F, getattr(torch._C, "_nn"), torch)  # noqa: B009
    found = {
        function: name
        for module in modules
        for name in (*_NAMES, *_FILLED)
        if (function := getattr(module, name, None)) is not None
    }
    return found | _OTHER_FUNCTIONS


@cache
def _signature(name: str) -> Signature:
    required, defaults = _SIGNATURES[name]
    kind = Parameter.POSITIONAL_OR_KEYWORD
    parameters = [Parameter(part, kind) for part in required.split()]
    parameters += [Parameter(part, kind, default=value) for part, value in defaults.items()]
    return Signature(parameters)


def named_call(node: Any) -> NamedCall | None:
    """Return a node's call under its common name, or None for a call that has no name here.

    >>> graph = fx.symbolic_trace(lambda x: x.softmax(-1)).graph
    >>> named_call(list(graph.nodes)[1])
    NamedCall(name='softmax', args=(x, -1, 3, None))
    """
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_function":
        name = _functions().get(node.target) or _OTHER_OPS.get(str(node.target))
    else:
        name = _METHODS.get(str(node.target)) if node.op == "call_method" else None
    if name is None:
        return None
    if name == "to":
        return _cast_call(node)
    if name in _FILLED:
        return _filled_call(node, name)
    if name in _VARIADIC:
        shape = node.args[1:]
        single = len(shape) == 1 and not isinstance(shape[0], int)
        return NamedCall(name, (node.args[0], shape[0] if single else tuple(shape)))
    if name not in _SIGNATURES:
        return None if node.kwargs else NamedCall(name, tuple(node.args))
    try:
        bound = _signature(name).bind(*node.args, **node.kwargs)
    except TypeError:
        return None  # a spelling with other arguments, such as `out`
    bound.apply_defaults()
    mutates = bound.arguments.get("inplace") is True
    mutates |= name == "batch_norm" and bound.arguments["training"] is not False
    return None if mutates else NamedCall(name, bound.args)


def defaults_of(name: str, count: int) -> tuple[Any, ...]:
    """Return the defaults of the arguments of a named call; `Parameter.empty` if one has none."""
    if name not in _SIGNATURES:
        return (Parameter.empty,) * count
    return tuple(p.default for p in _signature(name).parameters.values())[:count]


def _cast_call(node: fx.Node) -> NamedCall:
    """Return `to` with its input only: the dtype and device are those of the node's value."""
    return NamedCall("to", (node.args[0],))


def _filled_call(node: fx.Node, name: str) -> NamedCall | None:
    """Return `full` with its number only: the shape and dtype are those of the node's value."""
    if node.kwargs.get("out") is not None or node.kwargs.get("requires_grad"):
        return None
    number = _FILLED[name]
    if name == "full":
        number = node.args[1] if len(node.args) == 2 else node.kwargs.get("fill_value")
    elif name == "tensor":
        number = node.args[0] if node.args else None
    return NamedCall("full", (number,))


def value_of(node: Any) -> Any:
    """Return the fake value of a node, or the argument itself if it is a constant."""
    return node.meta.get(VALUE) if isinstance(node, fx.Node) else node


def tensor_of(node: Any) -> Tensor | None:
    """Return the fake tensor of a node, or None if it is none."""
    value = value_of(node)
    return value if isinstance(value, Tensor) else None


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node uses, in order."""
    return list(node.all_input_nodes)


def mutated_by(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that a call writes into; of an unknown call with an effect, all."""
    if node.op in ("placeholder", "output", "get_attr") or named_call(node) is not None:
        return []
    arguments = inputs_of(node)
    target = node.target
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return arguments if schema.is_mutable else []
    if node.op == "call_method":
        name = str(target)
        return arguments[:1] if name.endswith("_") and not name.endswith("__") else []
    name = getattr(target, "__name__", "")
    if "out" in node.kwargs or node.kwargs.get("inplace") is True or True in node.args[1:]:
        return arguments
    in_place = getattr(operator, name, None) is target and name.startswith("i") and name != "is_"
    if in_place or name.endswith("_") or name == "setitem":
        return arguments[:1]
    keeps = getattr(target, "__module__", "") or ""
    pure = keeps.startswith(("torch._C", "torch.functional", "_operator", "operator", "math"))
    ours = pure or keeps == "torch" or isinstance(target, type) or target in _torch_functions()
    return [] if ours and "batch_norm" not in name else arguments


@cache
def _torch_functions() -> frozenset[Any]:
    return frozenset(v for m in (torch, F, torch.Tensor) for v in vars(m).values() if callable(v))


def storage_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map each node to the first node whose storage it may share; itself for a new tensor."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        call = named_call(node)
        viewed = call.name in _VIEWS if call else _may_view(node)
        sources = inputs_of(node)
        roots[node] = roots[sources[0]] if viewed and sources else node
    return roots


def _may_view(node: fx.Node) -> bool:
    if node.op == "call_method":
        return str(node.target) in _VIEW_METHODS or str(node.target).endswith("_")
    return bool(mutated_by(node))


def mutations(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """Return each mutating call with the storage root of what it writes into, in order."""
    roots = storage_roots(graph)
    return [(node, roots[arg]) for node in graph.nodes for arg in mutated_by(node)]


def grad_regions(graph: fx.Graph) -> dict[fx.Node, int]:
    """Number each node by the region it is in: grad mode and autocast change between regions."""
    region, regions = 0, {}
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        region += "grad_enabled" in name or "autocast" in name or "inference_mode" in name
        regions[node] = region
    return regions


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """What a pass may not change about a graph."""

    inputs: tuple[str, ...]
    outputs: tuple[tuple[Any, ...], ...]
    """Shape and dtype of each output, and the input that it may alias."""
    mutations: tuple[tuple[str, str], ...]
    """Name of each call with an effect, and of the value that it mutates."""

    @staticmethod
    def of(graph: fx.Graph) -> GraphSpec:
        """Describe a graph of Dynamo."""
        roots = storage_roots(graph)
        output = next(iter(reversed(graph.nodes)))
        return GraphSpec(
            inputs=tuple(n.name for n in graph.nodes if n.op == "placeholder"),
            outputs=tuple(_describe(node, roots) for node in inputs_of(output)),
            mutations=tuple((node.name, root.name) for node, root in mutations(graph)),
        )

    def check(self, graph: fx.Graph, name: str) -> None:
        """Raise an error if the graph has come to differ after the pass `name`."""
        graph.lint()
        found = GraphSpec.of(graph)
        for part in ("inputs", "outputs", "mutations"):
            before, after = getattr(self, part), getattr(found, part)
            if before != after:
                raise GraphError(
                    f"pass {name}: the graph's {part} changed from {_brief(before, after)}",
                    hint="report it with the model; `torch.compile(model)` does not use the pass",
                )


def _describe(node: fx.Node, roots: dict[fx.Node, fx.Node]) -> tuple[Any, ...]:
    value = value_of(node)
    root = roots[node]
    aliased = root.name if root.op == "placeholder" else None
    if not isinstance(value, Tensor):
        return (str(value), aliased)
    return (str(tuple(value.shape)), value.dtype, aliased)


def _brief(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    pairs: Iterable[tuple[Any, Any]] = zip(before, after, strict=False)
    first = next(((b, a) for b, a in pairs if a != b), (len(before), len(after)))
    return f"{first[0]} to {first[1]}"


def same_value(one: Any, other: Any) -> bool:
    """Return whether two fake values have the same shape and dtype.

    >>> same_value(torch.ones(2), torch.zeros(2)), same_value(torch.ones(2), torch.ones(1))
    (True, False)
    """
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    return one.dtype == other.dtype and same_shape(one.shape, other.shape)


def same_shape(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Return whether two shapes are known to be equal; symbolic ones without adding a guard.

    >>> same_shape((2, 3), (2, 3)), same_shape((2,), (3,))
    (True, False)
    """
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    first, second = list(one), list(other)
    if len(first) != len(second):
        return False
    return all(statically_known_true(a == b) for a, b in zip(first, second, strict=True))


def nodes_between(first: fx.Node, last: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes from one to another, in order, both included."""
    node = first
    while node is not last:
        yield node
        node = node.next
    yield last
