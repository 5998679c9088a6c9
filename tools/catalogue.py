"""Writes the catalogue of ops into its docs page while the site is built.

A hook of mkdocs: the page is made from the records at every build, so it cannot be stale.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from ingot.ops.description import family_doc
from ingot.ops.description import page as page_of
from ingot.ops.record import registry

PLACE = "<!-- catalogue -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the catalogue where the page asks for it."""
    return markdown.replace(PLACE, render()) if page.file.src_uri == "ops.md" else markdown


def render() -> str:
    """Every op, by family."""
    ops = sorted(registry().values(), key=lambda op: op.family)
    sections: list[str] = []
    for family, members in groupby(ops, key=lambda op: op.family):
        first, *rest = members
        pages = map(page_of, (first, *rest))
        sections.append("\n\n".join((f"## {family}", family_doc(first), *pages)))
    return f"{len(ops)} ops.\n\n" + "\n\n".join(sections)
