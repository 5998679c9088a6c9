"""Conversations about Python's standard library, made from its docstrings.

    python -m tools.stdlib_chats stdlib-chats

writes `train.jsonl` (500 conversations) and `validation.jsonl` (50, about other functions) for
`recipes/smollm2-sft.toml`. They depend on the version of Python and on nothing else. Every answer
has the same form: the call, what it does in one sentence, and where to read more.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

MODULES = """
argparse ast asyncio base64 bisect calendar cmath codecs collections compileall configparser
contextlib copy csv datetime decimal difflib dis email.utils enum fileinput fnmatch fractions
functools gc getpass gettext glob gzip hashlib heapq hmac html http.client imaplib inspect io
ipaddress itertools json keyword linecache locale logging lzma mailbox math mimetypes
multiprocessing ntpath numbers operator os os.path pathlib pdb pickle pkgutil platform plistlib
posixpath pprint queue quopri random re reprlib sched secrets select selectors shelve shlex
shutil signal site smtplib socket sqlite3 ssl stat statistics string stringprep struct
subprocess symtable sys sysconfig tarfile tempfile textwrap threading time timeit tokenize
trace traceback tracemalloc types typing unicodedata unittest.mock urllib.parse urllib.request
uuid venv warnings wave weakref xml.sax.saxutils zipfile zlib zoneinfo
"""
MAX_SIGNATURE, MAX_SENTENCE = 80, 160
_SENTENCE = re.compile(r"(.+?[.!])(?:\s|$)", re.DOTALL)
_QUESTIONS = (
    "What does `{name}` do?",
    "Explain `{name}`.",
    "How do I use `{name}`?",
    "I saw `{name}` in some Python code. What is it for?",
)


class Function(NamedTuple):
    """A function of the standard library."""

    module: str
    name: str
    signature: str
    summary: str

    @property
    def qualified(self) -> str:
        """Its name with that of its module."""
        return f"{self.module}.{self.name}"

    @property
    def order(self) -> bytes:
        """A key that shuffles functions in the same way everywhere."""
        return hashlib.sha256(self.qualified.encode()).digest()


def functions() -> Iterator[Function]:
    """Yield the documented functions of the modules, each of them once."""
    seen: set[int] = set()
    for module_name in MODULES.split():
        module = importlib.import_module(module_name)
        for name in sorted(vars(module)):
            value = getattr(module, name)
            if name.startswith("_") or not inspect.isroutine(value) or id(value) in seen:
                continue
            seen.add(id(value))
            signature, summary = _signature(value), _summary(value)
            if signature and summary:
                yield Function(module_name, name, signature, summary)


def conversation(function: Function, number: int) -> dict[str, Any]:
    """Return the conversation about a function; every fifth has a second question."""
    question = _QUESTIONS[number % len(_QUESTIONS)].format(name=function.qualified)
    answer = (
        f"`{function.qualified}{function.signature}`\n\n{function.summary}\n\n"
        f"Read more: `help({function.qualified})`"
    )
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if number % 5 == 0:
        messages += [
            {"role": "user", "content": "Which module do I import for it?"},
            {"role": "assistant", "content": f"`import {function.module}`"},
        ]
    return {"messages": messages}


def _signature(value: Any) -> str | None:
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):
        return None
    # Defaults without a literal, such as <object object at 0x...>, differ between runs.
    return None if len(signature) > MAX_SIGNATURE or "<" in signature else signature


def _summary(value: Any) -> str | None:
    """Return the first sentence of a docstring, on one line."""
    found = _SENTENCE.match(inspect.getdoc(value) or "")
    summary = " ".join(found[1].split()) if found else ""
    is_sentence = summary[:1].isupper() and summary.isascii() and len(summary) >= 20
    return summary if is_sentence and len(summary) <= MAX_SENTENCE else None


def write_rows(
    directory: Path,
    candidates: Iterable[Function],
    row: Callable[[Function, int], dict[str, Any]],
    num_train: int,
    num_validation: int,
) -> None:
    """Write `train.jsonl` and `validation.jsonl` with the rows of some of the functions."""
    total = num_train + num_validation
    chosen = sorted(candidates, key=lambda function: function.order)[:total]
    assert len(chosen) == total, f"only {len(chosen)} functions"
    directory.mkdir(parents=True, exist_ok=True)
    splits = {"train": chosen[:num_train], "validation": chosen[num_train:]}
    for name, part in splits.items():
        rows = [json.dumps(row(function, number)) for number, function in enumerate(part)]
        (directory / f"{name}.jsonl").write_text("\n".join(rows) + "\n")


def main(directory: Path) -> None:
    """Write both files."""
    write_rows(directory, functions(), conversation, 500, 50)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
