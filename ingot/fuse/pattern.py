"""Patterns over the named calls of a graph.

A pattern is an expression of the classes here, for example that of `silu(x) * y`:

    Call("mul", Call("silu", Arg("x")), Arg("y"))

`Call` tries both orders of a commutative call. Arguments that a pattern leaves out must have their
defaults. Between calls, a pattern looks through calls that return their input: a dropout that is
off, a cast to the dtype it has, `contiguous`. `Match` collects what an `Arg` stands for, and the
calls that are inside the match: the subgraph that a rewrite replaces and the proof repeats.
"""

# pyright: basic
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ingot.fuse.graph import NamedCall, defaults_of, named_call, same_shape, tensor_of, value_of

_COMMUTATIVE = {"add", "mul"}
_NO_EFFECT = {"to", "dropout", "contiguous", "view", "reshape", "expand"}


@dataclass(frozen=True, kw_only=True)
class Match:
    """What a pattern found: the value of each `Arg`, and the calls inside it."""

    args: dict[str, Any]
    inside: tuple[fx.Node, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.args[name]

    def get(self, name: str) -> Any:
        """Return the value of an argument, None if this form of the pattern has none."""
        return self.args.get(name)

    def tensors(self, *names: str) -> list[Tensor]:
        """Return the fake tensors of the arguments that are there."""
        found = (tensor_of(self.get(name)) for name in names)
        return [tensor for tensor in found if tensor is not None]

    def one_dtype(self, *names: str) -> bool:
        """Return whether the tensors that are there have one floating dtype."""
        dtypes = {tensor.dtype for tensor in self.tensors(*names)}
        return len(dtypes) == 1 and next(iter(dtypes)).is_floating_point

    def bind(self, name: str, value: Any) -> Match | None:
        """Return the match with an argument bound, or None if it is another value already."""
        if name in self.args:
            known = self.args[name]
            same = known is value or (not isinstance(value, fx.Node) and known == value)
            return self if same else None
        return replace(self, args={**self.args, name: value})

    def enter(self, *nodes: fx.Node) -> Match:
        """Return the match with more calls inside."""
        new = tuple(node for node in nodes if node not in self.inside)
        return replace(self, inside=(*self.inside, *new)) if new else self


class Pattern:
    """Something that matches a node or a constant in none, one or several ways."""

    def matches(self, value: Any, match: Match) -> Iterator[Match]:
        """Yield the ways in which a value completes a match."""
        raise NotImplementedError


@dataclass(frozen=True)
class Arg(Pattern):
    """Any tensor; the same name twice must be the same tensor."""

    name: str

    def matches(self, value: Any, match: Match) -> Iterator[Match]:
        """Bind the tensor."""
        source, skipped = strip(value)
        if isinstance(source, fx.Node) and tensor_of(source) is not None:
            bound = match.enter(*skipped).bind(self.name, source)
            if bound is not None:
                yield bound


@dataclass(frozen=True)
class Number(Pattern):
    """A number: a constant, or a node whose value is one (with dynamic shapes)."""

    name: str

    def matches(self, value: Any, match: Match) -> Iterator[Match]:
        """Bind the number."""
        found = value_of(value)
        if isinstance(found, int | float | torch.SymInt | torch.SymFloat) and (
            bound := match.bind(self.name, value)
        ):
            yield bound


@dataclass(frozen=True)
class Constant(Pattern):
    """A constant with this value; numbers to the precision that models spell them with."""

    value: Any

    def matches(self, value: Any, match: Match) -> Iterator[Match]:
        """Compare."""
        if isinstance(value, fx.Node):
            return
        numbers = isinstance(self.value, int | float) and isinstance(value, int | float)
        flags = isinstance(self.value, bool) or isinstance(value, bool)
        if numbers and not flags:
            if math.isclose(self.value, value, rel_tol=1e-6):
                yield match
        elif type(self.value) is type(value) and self.value == value:
            yield match


@dataclass(frozen=True)
class Anything(Pattern):
    """Any argument at all, bound for the condition to look at if it has a name."""

    name: str | None = None

    def matches(self, value: Any, match: Match) -> Iterator[Match]:
        """Bind the argument."""
        bound = match if self.name is None else match.bind(self.name, value)
        if bound is not None:
            yield bound


@dataclass(frozen=True, init=False)
class Call(Pattern):
    """A named call; `output` also makes its result a result of the rewrite, under that name."""

    name: str
    args: tuple[Pattern, ...]
    output: str | None

    def __init__(self, name: str, *args: Pattern, output: str | None = None) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "output", output)

    def matches(self, value: Any, match: Match) -> Iterator[Match]:
        """Match the call, in both orders if it is commutative."""
        source, skipped = strip(value)
        call = named_call(source)
        if call is None or call.name != self.name or not _rest_is_default(call, len(self.args)):
            return
        entered = match.enter(*skipped, source)
        if self.output is not None:
            entered = entered.bind(self.output, source)
            if entered is None:
                return
        first = call.args[: len(self.args)]
        orders = [first, first[::-1]] if self.name in _COMMUTATIVE else [first]
        for order in orders:
            yield from _match_all(self.args, order, entered)


@dataclass(frozen=True, init=False)
class Either(Pattern):
    """One of several spellings; each that matches is tried."""

    options: tuple[Pattern, ...]

    def __init__(self, *options: Pattern) -> None:
        object.__setattr__(self, "options", options)

    def matches(self, value: Any, match: Match) -> Iterator[Match]:
        """Try the options in order."""
        for option in self.options:
            yield from option.matches(value, match)


@dataclass(frozen=True)
class Given(Pattern):
    """A pattern that sets an argument of the replacement, such as which activation it found."""

    of: Pattern
    name: str
    value: Any

    def matches(self, value: Any, match: Match) -> Iterator[Match]:
        """Bind the value to the name."""
        bound = match.bind(self.name, self.value)
        if bound is not None:
            yield from self.of.matches(value, bound)


@dataclass(frozen=True)
class Cast(Pattern):
    """A pattern, possibly cast to another floating dtype."""

    of: Pattern

    def matches(self, value: Any, match: Match) -> Iterator[Match]:
        """Match through the cast if there is one, then without."""
        source, skipped = strip(value)
        call = named_call(source)
        if call is not None and call.name == "to" and _is_floating_cast(source, call):
            yield from self.of.matches(call.args[0], match.enter(*skipped, source))
        yield from self.of.matches(value, match)


@dataclass(frozen=True)
class Reshaped(Pattern):
    """A pattern whose result was given another shape by `view` or `reshape`, or not."""

    of: Pattern

    def matches(self, value: Any, match: Match) -> Iterator[Match]:
        """Match through the view if there is one, then without."""
        source, skipped = strip(value)
        call = named_call(source)
        if call is not None and call.name in ("view", "reshape"):
            yield from self.of.matches(call.args[0], match.enter(*skipped, source))
        yield from self.of.matches(value, match)


def find(pattern: Pattern, root: fx.Node) -> Iterator[Match]:
    """Yield the ways in which the result of `root` matches.

    >>> graph = fx.symbolic_trace(lambda x: torch.tanh(x)).graph
    >>> x, tanh, _ = graph.nodes
    >>> x.meta["example_value"] = tanh.meta["example_value"] = torch.ones(1)
    >>> [match["a"] for match in find(Call("tanh", Arg("a")), tanh)]
    [x]
    """
    if strip(root)[0] is root:  # otherwise it is found at what `root` returns
        yield from pattern.matches(root, Match(args={}))


def strip(value: Any) -> tuple[Any, tuple[fx.Node, ...]]:
    """Return the value that calls only pass through, and those calls."""
    skipped: list[fx.Node] = []
    while (source := _returned_input(value)) is not None:
        skipped.append(value)
        value = source
    return value, tuple(skipped)


def _returned_input(value: Any) -> fx.Node | None:
    """Return the input of a call that returns it unchanged, None for other calls."""
    call = named_call(value)
    if call is None or call.name not in _NO_EFFECT or not isinstance(call.args[0], fx.Node):
        return None
    before, after = tensor_of(call.args[0]), tensor_of(value)
    if before is None or after is None:
        return None
    if call.name == "dropout":
        p, training = call.args[1:3]
        return call.args[0] if training is False or p == 0 else None
    same = before.dtype == after.dtype and before.device == after.device
    same = same and same_shape(before.shape, after.shape)
    return call.args[0] if same else None


def _match_all(patterns: tuple[Pattern, ...], values: tuple[Any, ...], m: Match) -> Iterator[Match]:
    if not patterns:
        yield m
        return
    for found in patterns[0].matches(values[0], m):
        yield from _match_all(patterns[1:], values[1:], found)


def _rest_is_default(call: NamedCall, given: int) -> bool:
    """Return whether the arguments that a pattern leaves out have their defaults."""
    if given > len(call.args):
        return False
    return all(
        not isinstance(value, fx.Node) and value == default
        for value, default in zip(
            call.args[given:], defaults_of(call.name, len(call.args))[given:], strict=True
        )
    )


def _is_floating_cast(node: fx.Node, call: NamedCall) -> bool:
    before, after = tensor_of(call.args[0]), tensor_of(node)
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return False
    return before.is_floating_point() and after.is_floating_point()
