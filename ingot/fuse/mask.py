"""Finds out what an attention mask lets a query see, from the calls that build it.

transformers builds masks of (B, 1, Q, K) from index tensors: `arange(K) <= arange(Q)[:, None]`, and
a padding mask that is indexed by batch and key. The calls are evaluated here on expressions instead
of numbers: each element of a tensor is an expression of its indices. A mask whose expression is
`k <= q` is causal for all lengths, which no look at its values could show.

Dimensions are counted from the last, -1, so that broadcasting does not change an expression.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from ingot.fuse.graph import named_call, same_shape, tensor_of
from ingot.fuse.pattern import Match, Pattern

_FLIPPED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq", "ne": "ne"}


@dataclass(frozen=True)
class Const:
    """The same value everywhere."""

    value: int | bool


@dataclass(frozen=True)
class Position:
    """The index along a dimension, plus an offset."""

    dim: int
    offset: int = 0


@dataclass(frozen=True)
class Element:
    """An element of a tensor that is not known, at these indices."""

    tensor: fx.Node
    indices: tuple[Expression, ...]


@dataclass(frozen=True)
class Compare:
    """A comparison of two expressions."""

    name: str
    left: Expression
    right: Expression


@dataclass(frozen=True)
class All:
    """True where all terms are."""

    terms: tuple[Expression, ...]


Expression: TypeAlias = Const | Position | Element | Compare | All


@dataclass(frozen=True, kw_only=True)
class MaskKind:
    """What a mask is known to be: the conjunction of these."""

    causal: bool
    """A query sees keys up to its own position."""
    padding: fx.Node | None
    """Which keys are tokens, (B, K), for all queries of a sequence."""


def classify(mask: fx.Node) -> MaskKind | None:
    """Return what a mask of (B, 1, Q, K) with as many queries as keys is, or None if unknown.

    It may have fewer dimensions, or a size of 1 where it is the same for all.
    """
    value = tensor_of(mask)
    if value is None or value.dtype != torch.bool or value.dim() not in (2, 3, 4):
        return None
    queries, keys = value.shape[-2:]
    if not (same_shape([queries], [keys]) or same_shape([queries], [1])):
        return None
    causal, padding = False, None
    for term in _terms(_evaluate(mask, {})):
        if _is_causal(term):
            causal = True
        elif (tokens := _padding_of(term)) is not None and padding in (None, tokens):
            padding = tokens
        elif term != Const(True):
            return None
    return MaskKind(causal=causal, padding=padding)


@dataclass(frozen=True)
class AttentionMask(Pattern):
    """No mask, or one that is known; binds `mask`, and its `causal` and `tokens`."""

    def matches(self, value: Any, match: Match) -> Iterator[Match]:
        """Bind what the mask is known to be."""
        bound = match.bind("mask", value)
        if bound is None or not (value is None or isinstance(value, fx.Node)):
            return
        kind = MaskKind(causal=False, padding=None) if value is None else classify(value)
        if kind is not None and (bound := bound.bind("causal", kind.causal)):
            bound = bound if kind.padding is None else bound.bind("tokens", kind.padding)
            if bound is not None:
                yield bound


def _terms(expression: Expression) -> tuple[Expression, ...]:
    return expression.terms if isinstance(expression, All) else (expression,)


def _is_causal(term: Expression) -> bool:
    match term:
        case Compare("le", Position(-1, key), Position(-2, query)):
            return key == query
        case Compare("lt", Position(-1, key), Position(-2, query)):
            return key == query - 1
        case Compare("ge" | "gt", left, right):
            return _is_causal(Compare(_FLIPPED[term.name], right, left))
    return False


def _padding_of(term: Expression) -> fx.Node | None:
    """Return the padding mask (B, K) that a term reads at batch and key."""
    match term:
        case Element(tensor, (Position(-4, 0), Position(-1, 0))):
            value = tensor_of(tensor)
            return tensor if value is not None and value.dtype == torch.bool else None
    return None


def _evaluate(node: fx.Node, known: dict[fx.Node, Expression]) -> Expression:
    """Return the expression of a node's elements."""
    if node not in known:
        value = tensor_of(node)
        rank = value.dim() if value is not None else 0
        unknown = Element(node, tuple(Position(d) for d in range(-rank, 0)))
        found = _evaluate_call(node, known)
        known[node] = _at_size_one(unknown if found is None else found, value)
    return known[node]


def _evaluate_call(node: fx.Node, known: dict[fx.Node, Expression]) -> Expression | None:
    call, value = named_call(node), tensor_of(node)
    if call is None or value is None:
        return None
    name, args = call
    if name == "arange":
        return Position(-1) if args[1] is None and args[2] == 1 else None
    if name == "new_ones":
        return Const(True)
    if not isinstance(args[0], fx.Node):
        return None
    source = tensor_of(args[0])
    if source is None:
        return None
    of = _evaluate(args[0], known)
    match name:
        case "to":
            return of if source.dtype == value.dtype or isinstance(of, Const) else None
        case "expand" | "contiguous":
            return of
        case "repeat":  # of a size of 1, like `expand`
            sizes = zip(args[1][::-1], source.shape[::-1], strict=False)
            expands = all(times == 1 or same_shape([size], [1]) for times, size in sizes)
            return of if expands else None
        case "unsqueeze":
            dim = args[1] if args[1] < 0 else args[1] - value.dim()
            return _insert(of, dim)
        case "getitem":
            return _getitem(args[0], of, args[1], value, known)
        case "add" | "sub":
            return _shift(of, args[1], 1 if name == "add" else -1)
        case "le" | "lt" | "ge" | "gt" | "eq" | "ne":
            return _compare(name, of, _operand(args[1], known))
        case "and":
            return _both(of, _operand(args[1], known))
        case "diff":
            return _difference(of, args, known)
        case "cumsum":
            return Const(0) if isinstance(of, Const) and not of.value else None
    return None


def _operand(value: Any, known: dict[fx.Node, Expression]) -> Expression | None:
    if isinstance(value, fx.Node):
        return _evaluate(value, known) if tensor_of(value) is not None else None
    return Const(value) if isinstance(value, int) else None


def _at_size_one(expression: Expression, value: Tensor | None) -> Expression:
    """Replace the index of dimensions of size 1 by 0: broadcasting repeats their one element."""
    if value is None:
        return expression
    ones = {d for d in range(-value.dim(), 0) if isinstance(s := value.shape[d], int) and s == 1}
    return _substitute(expression, dict.fromkeys(ones))


def _substitute(expression: Expression, dims: dict[int, int | None]) -> Expression:
    """Rename the dimensions of an expression; None stands for an index of 0."""
    match expression:
        case Position(dim, offset) if dim in dims:
            new = dims[dim]
            return Const(offset) if new is None else Position(new, offset)
        case Element(tensor, indices):
            return Element(tensor, tuple(_substitute(index, dims) for index in indices))
        case Compare(name, left, right):
            return Compare(name, _substitute(left, dims), _substitute(right, dims))
        case All(terms):
            return All(tuple(_substitute(term, dims) for term in terms))
    return expression


def _insert(expression: Expression, dim: int) -> Expression:
    """Insert a dimension: those in front of it are one further from the last."""
    return _substitute(expression, {d: d - 1 for d in range(-8, 0) if d <= dim})


def _getitem(
    tensor: fx.Node,
    of: Expression,
    key: Any,
    value: Tensor,
    known: dict[fx.Node, Expression],
) -> Expression | None:
    keys = key if isinstance(key, tuple) else (key,)
    source = tensor_of(tensor)
    assert source is not None
    if keys and all(isinstance(k, fx.Node) for k in keys):
        if len(keys) != source.dim():
            return None
        if isinstance(of, Const):
            return of
        return Element(tensor, tuple(_evaluate(k, known) for k in keys))
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        missing = source.dim() - sum(k not in (None, Ellipsis) for k in keys)
        keys = (*keys[:at], *(slice(None),) * missing, *keys[at + 1 :])
    keys = (*keys, *(slice(None),) * (value.dim() - len(keys)))
    if len(keys) != value.dim() or any(k is not None and not _from_start(k) for k in keys):
        return None
    dims: dict[int, int | None] = {}
    position = -source.dim()
    for new, k in enumerate(keys, start=-value.dim()):
        if k is not None:
            dims[position] = new
            position += 1
    return _substitute(of, dims)


def _from_start(key: Any) -> bool:
    """Return whether a key selects the first elements of a dimension, or all."""
    return isinstance(key, slice) and key.start in (None, 0) and key.step in (None, 1)


def _shift(of: Expression, by: Any, sign: int) -> Expression | None:
    if not isinstance(by, int):
        return None
    match of:
        case Const(value):
            return Const(value + sign * by)
        case Position(dim, offset):
            return Position(dim, offset + sign * by)
    return None


def _compare(name: str, left: Expression, right: Expression | None) -> Expression | None:
    if right is None:
        return None
    if left == right:
        return Const(name in ("le", "ge", "eq"))
    match left, right:
        case Const(a), Const(b):
            outcomes = {"le": a <= b, "lt": a < b, "ge": a >= b, "gt": a > b, "eq": False}
            return Const(outcomes.get(name, True))
        case Position(_, offset), Const(b) if name == "ge" and offset >= b:
            return Const(True)
        case Position(_, offset), Const(b) if name == "gt" and offset > b:
            return Const(True)
    return Compare(name, left, right)


def _both(left: Expression, right: Expression | None) -> Expression | None:
    if right is None:
        return None
    terms = [term for term in (*_terms(left), *_terms(right)) if term != Const(True)]
    if Const(False) in terms:
        return Const(False)
    unique = tuple(dict.fromkeys(terms))
    return unique[0] if len(unique) == 1 else All(unique) if unique else Const(True)


def _difference(
    of: Expression, args: tuple[Any, ...], known: dict[fx.Node, Expression]
) -> Expression | None:
    """Return `diff` of consecutive numbers, whose first is preceded by the number before it."""
    n, dim, prepend, append = args[1:]
    if not (isinstance(of, Position) and n == 1 and dim == of.dim == -1 and append is None):
        return None
    if not (isinstance(prepend, fx.Node) and _evaluate(prepend, known) == Const(of.offset - 1)):
        return None
    value = tensor_of(prepend)
    return Const(1) if value is not None and value.shape[-1] == 1 else None
