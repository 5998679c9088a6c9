"""Syntax trees of Python files, parsed once however many checks read them."""

from __future__ import annotations

import ast
from functools import cache


@cache
def parse(text: str) -> ast.Module:
    """Return the tree of a file with this text, the same at each call."""
    return ast.parse(text)


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Return all nodes of the tree, in the order of `ast.walk`.

    >>> [type(node).__name__ for node in nodes("x = 1")[:3]]
    ['Module', 'Assign', 'Name']
    """
    return tuple(ast.walk(parse(text)))


def forget() -> None:
    """Free the trees: those of this repository take 100 MB."""
    parse.cache_clear()
    nodes.cache_clear()
