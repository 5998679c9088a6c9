"""Import contracts: which package may import which, and no import cycles.

The contract types that come with import-linter name modules that exist. `Packages` is a table of
the whole design, planned packages included, so that a package is under contract from its first
module on; a package that is not in the table is an error. `Acyclic` forbids import cycles between
modules. It counts every import: in functions and under TYPE_CHECKING too, because a module that
needs another one's types cannot be understood or moved without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class _ListingContract(Contract):
    """A contract whose check collects lines of text about what breaks it."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Check the imports of the package."""
        root = self.session_options["root_packages"][0]
        violations = self._violations(graph, root)
        return ContractCheck(kept=not violations, metadata={"violations": violations})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the violations."""
        for line in check.metadata["violations"]:
            output.print_error(line)

    def _violations(self, graph: ImportGraph, root: str) -> list[str]:
        raise NotImplementedError


class Packages(_ListingContract):
    """`allow` holds lines of the form "package -> package package ..."."""

    allow = fields.ListField(subfield=fields.StringField())

    def _violations(self, graph: ImportGraph, root: str) -> list[str]:
        """List every direct import that the table does not allow."""
        allowed = self._table()
        violations: list[str] = []
        for importer in sorted(m for m in graph.modules if m.startswith(f"{root}.")):
            package = importer.split(".")[1]
            if package not in allowed:
                violations.append(f"{importer} is in a package that the contract does not list")
                continue
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                # The root itself gives access to every package, so it counts as one, `ingot`.
                parts = [*imported.split("."), root]
                if parts[0] != root or parts[1] in {package, *allowed[package]}:
                    continue
                violations.append(f"{importer} imports {imported}")
        return violations

    def _table(self) -> dict[str, set[str]]:
        lines = [str(line).split("->") for line in self.allow]  # pyright: ignore
        return {package.strip(): set(others.split()) for package, others in lines}


class Acyclic(_ListingContract):
    """Modules do not import each other in a cycle."""

    def _violations(self, graph: ImportGraph, root: str) -> list[str]:
        """List the cycles, one for each group of modules that all reach each other."""
        modules = sorted(m for m in graph.modules if m == root or m.startswith(f"{root}."))
        return [
            f"import cycle: {' -> '.join(cycle)}"
            for cycle in find_cycles(modules, graph.find_modules_directly_imported_by)
        ]


def find_cycles(nodes: Iterable[str], edges: Callable[[str], Iterable[str]]) -> list[list[str]]:
    """Return a shortest cycle of each strongly connected component, the first node at both ends.

    >>> graph = {"a": ["b", "d"], "b": ["c"], "c": ["a"], "d": []}
    >>> find_cycles(graph, lambda node: graph[node])
    [['a', 'b', 'c', 'a']]
    """
    cycles: list[list[str]] = []
    seen: set[str] = set()
    for node in nodes:
        if node not in seen and (cycle := _shortest_cycle(node, edges)):
            cycles.append(cycle)
            reachable = _reachable(node, edges)
            seen |= {other for other in reachable if node in _reachable(other, edges)}
    return cycles


def _shortest_cycle(start: str, edges: Callable[[str], Iterable[str]]) -> list[str] | None:
    """Return a shortest path from a node back to itself."""
    paths = [[start]]
    visited: set[str] = set()
    for path in paths:  # grows while it is walked: breadth first
        for following in sorted(edges(path[-1])):
            if following == start:
                return [*path, start]
            if following not in visited:
                visited.add(following)
                paths.append([*path, following])
    return None


def _reachable(start: str, edges: Callable[[str], Iterable[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        for following in edges(waiting.pop()):
            if following not in reached:
                reached.add(following)
                waiting.append(following)
    return reached
