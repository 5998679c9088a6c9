"""The import contract: which room of the package may import which.

import-linter's own contract types name modules that exist. This one is a table of the whole
design, rooms to come included, so that a room is under contract on the day it appears; a room
that is not in the table is an error itself.
"""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class Rooms(Contract):
    """`allow` holds lines of the form "room -> room room ..."."""

    allow = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Find every direct import that the table does not allow."""
        allowed = self._table()
        root = self.session_options["root_packages"][0]
        found: list[str] = []
        for importer in sorted(m for m in graph.modules if m.startswith(f"{root}.")):
            room = importer.split(".")[1]
            if room not in allowed:
                found.append(f"{importer} is in a room that the contract does not list")
                continue
            for imported in sorted(graph.find_modules_directly_imported_by(importer)):
                # The root itself gives access to every room, so it counts as one, `ingot`.
                parts = [*imported.split("."), root]
                if parts[0] != root or parts[1] in {room, *allowed[room]}:
                    continue
                found.append(f"{importer} imports {imported}")
        return ContractCheck(kept=not found, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print what was found."""
        for line in check.metadata["found"]:
            output.print_error(line)

    def _table(self) -> dict[str, set[str]]:
        lines = [str(line).split("->") for line in self.allow]  # pyright: ignore
        return {room.strip(): set(others.split()) for room, others in lines}
