"""Find words that the project does not use, where users and contributors would read them.

`docs/glossary.md` explains the vocabulary; `tests/test_policy.py` counts the hits of each kind of
text and allows none in what users read. A word is a regular expression and its replacement.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.syntax import nodes

WORDS: dict[str, str] = {
    r"behind(?! (?:a|an|the|your) (?:\w+ )?(?:proxy|proxies|firewall|load balancer))": "after",
    r"told|tells?|telling": "reports, is notified, shows",
    r"beside": "next to, compared with",
    r"anew": "again",
    r"whoever|somebody|nobody|everybody|anybody": "name the client, request, caller or thread",
    r"so many(?! that)": "N, `num_x`",
    r"in turns": "interleaved",
    r"is no(?= (?!longer\b|more than\b))": "is not a",
    r"(?:go|goes|going|went|gone) on": "continues, resumes",
    r"to the bit": "bit for bit",
    r"so-manieth": "every n-th",
    r"is to be": "will be, must be",
    r"makes? of it": "computes, builds",
    r"(?:kv|cache|memory|key|value|its|free|shared) pages?": "block",
    r"pages? of (?:the )?(?:kv|keys|cache|pool)|page[ _-](?:size|table)": "block",
    r"guess(?:es|ed|ing)?": "draft, estimate",
    r"drawn|draws? (?:(?:a|the|one|its) )?(?:next |new )?(?:token|number)s?(?!/| per)": "sampled",
    r"(?<!dot )(?<!dot-)(?<!inner )(?<!outer )products?(?= of\b)|matrix products?": "matmul",
    r"powers(?! of)": "exponentials",
    r"pieces?": "micro-batch, chunk, tile, task, token (choose)",
    r"remed(?:y|ies)": "hint",
    r"exactness|exact(?! (?:match|string|same|number|version|gelu|copy|copies))": "batch-invariant",
    r"stands? in(?= for|[.,;:]|$)|stood in": "falls back to",
    r"held[ -]out": "validation",
    r"masters(?! weights)": "master weights",
    r"share of (?:the )?limit|(?:near|at|of|to|from) the limit|machine's limit": "roofline, peak",
}
"""Regular expressions, matched between word boundaries without regard to case, and replacements."""

_PATTERNS = [
    (re.compile(rf"(?<![\w`])(?:{word})(?![\w`])", re.IGNORECASE), use)
    for word, use in WORDS.items()
]
_LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
_MESSAGE_NAMES = {"what", "error", "message", "hint", "why", "reason", "detail"}
_CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CPP_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_CPP_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')


class Passage(NamedTuple):
    """A text with the line it begins at."""

    line: int
    text: str


class Hit(NamedTuple):
    """A word of the list, with its place and what to write instead."""

    path: Path
    line: int
    word: str
    use: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: '{self.word}': {self.use}"


def find_words(path: Path, passages: Iterator[Passage]) -> list[Hit]:
    """List the words of the list in these passages of a file."""
    hits: list[Hit] = []
    for begin, text in passages:
        # A line break inside a phrase is a space, so that wrapped text matches, too.
        flat = re.sub(r"[ \t]*\n[ \t#/*]*", lambda match: "\n".ljust(len(match[0])), text)
        spaced = flat.replace("\n", " ")
        for pattern, use in _PATTERNS:
            for match in pattern.finditer(spaced):
                line = begin + flat.count("\n", 0, match.start())
                hits.append(Hit(path, line, match[0], use))
    return hits


def markdown(text: str) -> Iterator[Passage]:
    """Yield the prose of a Markdown file, without its code blocks.

    >>> [passage.text for passage in markdown("a\\n```\\ncode\\n```\\nb")]
    ['a\\n\\n\\n\\nb']
    """
    yield Passage(1, _CODE_BLOCK.sub(lambda match: "\n" * match[0].count("\n"), text))


def docstrings(text: str) -> Iterator[Passage]:
    """Yield the docstrings of a Python file, and the strings that document attributes."""
    for node in nodes(text):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield Passage(value.lineno, value.value)


def comments(text: str) -> Iterator[Passage]:
    """Yield the comments of a Python file; lines that follow each other are one."""
    begin, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if lines and line != begin + len(lines):
            yield Passage(begin, "\n".join(lines))
            lines.clear()
        if not lines:
            begin = line
        lines.append(token.string.lstrip("# "))
    if lines:
        yield Passage(begin, "\n".join(lines))


def messages(text: str) -> Iterator[Passage]:
    """Yield the strings of a Python file that users read: of errors, hints and log messages.

    >>> code = 'raise IngotError("no file", hint="name one")\\nlog.info("done")\\nx = "other"'
    >>> [passage.text for passage in messages(code)]
    ['no file', 'name one', 'done']
    """
    found = {
        id(inner): inner
        for node in nodes(text)
        for part in _message_parts(node)
        for inner in ast.walk(part)
    }
    for node in found.values():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Passage(node.lineno, node.value)


def strings(text: str) -> Iterator[Passage]:
    """Yield all strings of a Python file: those of the command line are its help."""
    for node in nodes(text):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Passage(node.lineno, node.value)


def names(text: str) -> Iterator[Passage]:
    """Yield the names of functions and classes of a Python file as words.

    >>> [passage.text for passage in names("def _read_all(): ...\\nclass OpenFiles: ...")]
    ['read all', 'Open Files']
    """
    for node in nodes(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", node.name).replace("_", " ")
            yield Passage(node.lineno, words.strip())


def cpp_comments(text: str) -> Iterator[Passage]:
    """Yield the comments of a C++ file."""
    for match in _CPP_COMMENT.finditer(text):
        yield Passage(1 + text.count("\n", 0, match.start()), match[0].lstrip("/* "))


def cpp_strings(text: str) -> Iterator[Passage]:
    """Yield the string literals of a C++ file outside of its comments."""
    code = _CPP_COMMENT.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    for match in _CPP_STRING.finditer(code):
        yield Passage(1 + code.count("\n", 0, match.start()), match[0].strip('"'))


def _message_parts(node: ast.AST) -> list[ast.AST]:
    """Return the expressions of a node that hold messages."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return [*node.exc.args, *(keyword.value for keyword in node.exc.keywords)]
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        named = {target.id for target in targets if isinstance(target, ast.Name)}
        return [node.value] if named & _MESSAGE_NAMES else []
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if name in _LOG_METHODS or name.endswith("Error"):
            return list(arguments)
        return [keyword.value for keyword in node.keywords if keyword.arg in _MESSAGE_NAMES]
    return []
