"""Shows the examples of docstrings as code on the API page.

An extension of griffe, which reads the sources for mkdocstrings. It knows examples only below
a heading of their own; ours stand where they are needed, so they are fenced here.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .+(?:\n.+)*", re.MULTILINE)


def fenced(text: str) -> str:
    """The text with a code fence around each example.

    >>> fenced("Add.\\n\\n>>> 1 + 1\\n2")
    'Add.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    """
    return _EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", text)


class Examples(griffe.Extension):
    """Fences the examples of every object."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
