"""Finds out what an attention mask lets a query see, from the calls that build it.

transformers builds masks of (B, 1, Q, K) from index tensors: `arange(K) <= arange(Q)[:, None]`, and
a padding mask that is indexed by batch and key. The calls are evaluated here on expressions instead
of numbers: each element of a tensor is an expression of its indices. A mask whose expression is
`k <= q` is causal for all lengths, which no look at its values could show.

Models that write attention out build masks with `tril` or `triu` instead, as numbers, or keep one
in a buffer, whose values are known (`expression_of`).

Dimensions are counted from the last, -1, so that broadcasting does not change an expression.
"""

# pyright: basic
from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from ingot.fuse.graph import named_call, same_shape, tensor_of
from ingot.fuse.pattern import Match, Pattern

EXPRESSION = "expression"
"""Where a graph's input keeps the expression of its elements, if its values are known."""
_FLIPPED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq", "ne": "ne"}
_OPPOSITE = {"le": "gt", "lt": "ge", "ge": "lt", "gt": "le", "eq": "ne", "ne": "eq"}
_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", *_FLIPPED)
} | {"div": operator.truediv}
_HIDES = -1e4
"""A score of this or less has no weight next to any other: models write -1e4, -1e9 or -inf."""
_MAX_VALUES = 2**24


@dataclass(frozen=True)
class Const:
    """The same value everywhere."""

    value: float | bool


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


@dataclass(frozen=True)
class Not:
    """True where the term is not."""

    term: Expression


@dataclass(frozen=True)
class Where:
    """One number where a condition holds, another elsewhere."""

    condition: Expression
    then: float
    otherwise: float


Expression: TypeAlias = Const | Position | Element | Compare | All | Not | Where


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
    return _kind_of(mask, _evaluate(mask, {})) if _is_bool(mask) else None


def classify_hidden(mask: fx.Node) -> MaskKind | None:
    """Return what a mask that is true where a query does not see a key is."""
    return _kind_of(mask, _negated(_evaluate(mask, {}))) if _is_bool(mask) else None


def classify_added(mask: fx.Node) -> MaskKind | None:
    """Return what a mask that is added to scores is: 0, or a number that hides a key."""
    match _evaluate(mask, {}):
        case Where(condition, then, otherwise) if then == 0 and otherwise <= _HIDES:
            return _kind_of(mask, condition)
        case Where(condition, then, otherwise) if otherwise == 0 and then <= _HIDES:
            return _kind_of(mask, _negated(condition))
    return None


def hides(score: Any) -> bool:
    """Return whether a number that replaces a score hides the key."""
    return isinstance(score, int | float) and score <= _HIDES


def _is_bool(node: fx.Node) -> bool:
    value = tensor_of(node)
    return value is not None and value.dtype == torch.bool


def _kind_of(mask: fx.Node, visible: Expression) -> MaskKind | None:
    """Return what a mask is, from the expression of what it lets a query see."""
    value = tensor_of(mask)
    if value is None or value.dim() not in (2, 3, 4):
        return None
    queries, keys = value.shape[-2:]
    if not (same_shape([queries], [keys]) or same_shape([queries], [1])):
        return None
    causal, padding = False, None
    for term in _terms(visible):
        if _is_causal(term):
            causal = True
        elif (tokens := _padding_of(term)) is not None and padding in (None, tokens):
            padding = tokens
        elif term != Const(True):
            return None
    return MaskKind(causal=causal, padding=padding)


def expression_of(values: Tensor) -> Expression | None:
    """Return the expression of a tensor with one number up to the diagonal and one above it.

    >>> expression_of(torch.ones(1, 3, 3).tril())
    Compare(name='le', left=Position(dim=-1, offset=0), right=Position(dim=-2, offset=0))
    """
    sizes = values.shape[-2:]
    if len(sizes) < 2 or sizes[0] != sizes[1] or not 1 < sizes[0] ** 2 <= _MAX_VALUES:
        return None
    if values.numel() != sizes[0] ** 2:  # the other dimensions are of size 1
        return None
    square = values.detach().reshape(sizes)
    corner, other = square[0, 0], square[0, -1]
    if not torch.equal(square, torch.where(torch.ones_like(square).tril() > 0, corner, other)):
        return None
    return _chosen(Compare("le", Position(-1), Position(-2)), corner.item(), other.item())


@dataclass(frozen=True)
class AttentionMask(Pattern):
    """No mask, or one that `classify` knows; binds `mask`, and its `causal` and `tokens`."""

    classify: Callable[[fx.Node], MaskKind | None] = classify

    def matches(self, value: Any, match: Match) -> Iterator[Match]:
        """Bind what the mask is known to be."""
        bound = match.bind("mask", value)
        if bound is None or not (value is None or isinstance(value, fx.Node)):
            return
        kind = MaskKind(causal=False, padding=None) if value is None else self.classify(value)
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
        found = node.meta.get(EXPRESSION) or _evaluate_call(node, known)
        known[node] = _at_size_one(unknown if found is None else found, value)
    return known[node]


def _evaluate_call(node: fx.Node, known: dict[fx.Node, Expression]) -> Expression | None:
    call, value = named_call(node), tensor_of(node)
    if call is None or value is None:
        return None
    name, args = call
    if name == "arange":
        return Position(-1) if args[1] is None and args[2] == 1 else None
    if name == "full":
        return Const(args[0]) if isinstance(args[0], int | float) else None
    if not isinstance(args[0], fx.Node):
        number = isinstance(args[0], int | float) and len(args) == 2
        return _arithmetic(name, args[0], _operand(args[1], known)) if number else None
    source = tensor_of(args[0])
    if source is None:
        return None
    of = _evaluate(args[0], known)
    match name:
        case "to":
            return of if source.dtype == value.dtype else _cast(of, value.dtype)
        case "expand" | "contiguous":
            return of
        case "view" | "reshape":
            return of if _differ_by_ones(source.shape, value.shape) else None
        case "repeat":  # of a size of 1, like `expand`
            sizes = zip(args[1][::-1], source.shape[::-1], strict=False)
            expands = all(times == 1 or same_shape([size], [1]) for times, size in sizes)
            return of if expands else None
        case "unsqueeze":
            dim = args[1] if args[1] < 0 else args[1] - value.dim()
            return _insert(of, dim)
        case "getitem":
            return _getitem(args[0], of, args[1], value, known)
        case "add" | "sub" if isinstance(of, Position):
            by = args[1] if name == "add" else -args[1] if isinstance(args[1], int) else None
            return Position(of.dim, of.offset + by) if isinstance(by, int) else None
        case "add" | "sub" | "mul" | "div":
            return _arithmetic(name, of, args[1])
        case "le" | "lt" | "ge" | "gt" | "eq" | "ne":
            return _compare(name, of, _operand(args[1], known))
        case "invert":
            return _negated(of) if value.dtype == torch.bool else None
        case "tril" | "triu":
            return _triangle(name, of, args[1])
        case "masked_fill":
            return _between(_evaluate(args[1], known), _operand(args[2], known), of)
        case "where":
            return _between(of, *(_operand(part, known) for part in args[1:]))
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
    return Const(value) if isinstance(value, int | float) else None


def _chosen(condition: Expression, then: float, otherwise: float) -> Expression:
    """Return the simplest expression of a choice; a condition is 1 or 0 as a number."""
    if isinstance(condition, Const):
        return Const(then if condition.value else otherwise)
    if then == otherwise:
        return Const(then)
    if (then, otherwise) == (1, 0):
        return condition
    return _negated(condition) if (then, otherwise) == (0, 1) else Where(condition, then, otherwise)


def _negated(expression: Expression) -> Expression:
    match expression:
        case Const(value):
            return Const(not value)
        case Compare(name, left, right):
            return Compare(_OPPOSITE[name], left, right)
        case Not(term):
            return term
    return Not(expression)


def _mapped(expression: Expression, function: Callable[[Any], Any]) -> Expression | None:
    """Apply a function to the numbers of an expression that has one or two."""
    match expression:
        case Const(value):
            return Const(function(value))
        case Where(condition, then, otherwise):
            return _chosen(condition, function(then), function(otherwise))
        case Compare() | All() | Not():
            return _chosen(expression, function(1), function(0))
        case Element(tensor) if _is_bool(tensor):
            return _chosen(expression, function(1), function(0))
    return None


def _cast(of: Expression, dtype: torch.dtype) -> Expression | None:
    if dtype == torch.bool:
        return _mapped(of, bool)
    kept = _mapped(of, lambda number: number)
    numbers = (kept.then, kept.otherwise) if isinstance(kept, Where) else ()
    exact = dtype.is_floating_point or all(number in (0, 1) for number in numbers)
    return kept if exact else None


def _arithmetic(name: str, left: Any, right: Any) -> Expression | None:
    """Return the result for an expression and a number, in this order or the other."""
    if name not in _NUMBERS:
        return None
    function = _NUMBERS[name]
    with suppress(ZeroDivisionError):
        if isinstance(left, Expression):
            return (
                _mapped(left, lambda number: function(number, right))
                if isinstance(right, int | float)
                else None
            )
        if isinstance(right, Expression):
            return (
                _mapped(right, lambda number: function(left, number))
                if isinstance(left, int | float)
                else None
            )
    return None


def _triangle(name: str, of: Expression, diagonal: Any) -> Expression | None:
    """Return `tril` or `triu` of the same number everywhere."""
    if not (isinstance(of, Const) and isinstance(diagonal, int)):
        return None
    keeps = Compare("le" if name == "tril" else "ge", Position(-1), Position(-2, diagonal))
    return _chosen(keeps, of.value, 0)


def _between(
    condition: Expression, then: Expression | None, otherwise: Expression | None
) -> Expression | None:
    if isinstance(then, Const) and isinstance(otherwise, Const):
        return _chosen(condition, then.value, otherwise.value)
    return None


def _differ_by_ones(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether shapes are the same but for sizes of 1 in front."""
    count = min(len(one), len(other))
    fronts = [*one[: len(one) - count], *other[: len(other) - count]]
    ends = same_shape(one[len(one) - count :], other[len(other) - count :])
    return ends and same_shape(fronts, [1] * len(fronts))


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
        case Not(term):
            return Not(_substitute(term, dims))
        case Where(condition, then, otherwise):
            return Where(_substitute(condition, dims), then, otherwise)
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


def _compare(name: str, left: Expression, right: Expression | None) -> Expression | None:
    if right is None:
        return None
    if left == right:
        return Const(name in ("le", "ge", "eq"))
    match left, right:
        case Const(a), Const(b):
            return Const(_NUMBERS[name](a, b))
        case Position(_, offset), Const(b) if name == "ge" and offset >= b:
            return Const(True)
        case Position(_, offset), Const(b) if name == "gt" and offset > b:
            return Const(True)
        case _, Const(b) if (found := _mapped(left, lambda a: _NUMBERS[name](a, b))) is not None:
            return found
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
