"""Finds class names that are used twice, long functions and long files.

A function may have 60 lines and a file 600, counted with their docstrings. A file that is longer
on purpose has a line near its top that begins with "Long because" and gives the reason.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tools.syntax import nodes, parse

MAX_FUNCTION, MAX_FILE = 60, 600
HEAD = 40
"""Lines from the top of a file within which the reason for its length must be."""


def duplicate_classes(sources: Mapping[Path, str]) -> list[str]:
    """List class names that are defined more than once; those that begin with "_" are local.

    >>> duplicate_classes({Path("a.py"): "class Plan: ...", Path("b.py"): "class Plan: ..."})
    ['Plan: a.py:1, b.py:1']
    """
    places: dict[str, list[str]] = defaultdict(list)
    for path, text in sources.items():
        for node in parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    return [f"{name}: {', '.join(at)}" for name, at in places.items() if len(at) > 1]


def long_functions(path: Path, text: str) -> list[str]:
    """List the functions of a Python file that have too many lines.

    >>> long_functions(Path("a.py"), "def f():\\n" + "    pass\\n" * 60)
    ['a.py:1: f has 61 lines, more than 60']
    """
    if explains_length(text):
        return []
    functions = [
        node for node in nodes(text) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [
        f"{path}:{node.lineno}: {node.name} has {count} lines, more than {MAX_FUNCTION}"
        for node in functions
        if (count := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION
    ]


def long_files(paths: Iterable[Path]) -> list[str]:
    """List the files that have too many lines and do not say why."""
    found: list[str] = []
    for path in paths:
        text = path.read_text()
        if (count := text.count("\n")) > MAX_FILE and not explains_length(text):
            found.append(f"{path}: {count} lines, more than {MAX_FILE}")
    return found


def explains_length(text: str) -> bool:
    """Return whether the head of a file says why the file is long.

    >>> explains_length('\"\"\"Tables.\\n\\nLong because it is one table.\"\"\"')
    True
    """
    head = [line.lstrip('/#* "') for line in text.splitlines()[:HEAD]]
    return any(line.startswith("Long because") for line in head)
