"""Preference pairs about Python's standard library: a short answer is preferred to a long one.

    python -m tools.length_pairs length-pairs

writes `train.jsonl` (200 pairs) and `validation.jsonl` (50, about other functions) for
`recipes/smollm2-dpo.toml`. The prompt asks about a function, the chosen answer is the first
sentence of its docstring, the rejected one says the same with more words. They depend on the
version of Python and on nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.stdlib_chats import Function, functions, write_rows

MAX_SUMMARY = 70
_SYSTEM = "You explain Python."
_QUESTIONS = ("What does `{name}` do?", "Explain `{name}`.", "What is `{name}` for?")
_OPENINGS = (
    "That is a good question, and I am happy to help you with it.",
    "Sure! Let me explain this step by step, so that it becomes clear.",
    "Thank you for asking. There is a lot to say about this function.",
)
_CLOSINGS = (
    "I hope this explanation helps. Please let me know if you would like to see an example.",
    "In summary, that is what this function does. Feel free to ask about other functions, too.",
)


def pair(function: Function, number: int) -> dict[str, Any]:
    """Return the pair of a function."""
    question = _QUESTIONS[number // 2 % len(_QUESTIONS)].format(name=function.qualified)
    opening, closing = _OPENINGS[number % len(_OPENINGS)], _CLOSINGS[number % len(_CLOSINGS)]
    return {
        "prompt": [_message("system", _SYSTEM), _message("user", question)],
        "chosen": [_message("assistant", function.summary)],
        "rejected": [_message("assistant", f"{opening} {function.summary} {closing}")],
    }


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def short_functions() -> Iterator[Function]:
    """Yield the functions with a short first sentence."""
    return (function for function in functions() if len(function.summary) <= MAX_SUMMARY)


def main(directory: Path) -> None:
    """Write both files."""
    write_rows(directory, short_functions(), pair, 200, 50)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
