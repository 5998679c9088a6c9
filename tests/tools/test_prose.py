"""A planted word is found in each kind of text, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tools import prose
from tools.prose import Passage

PATH = Path("file")


def words(passages: Iterator[Passage]) -> list[tuple[int, str]]:
    return [(hit.line, hit.word) for hit in prose.find_words(PATH, passages)]


@pytest.mark.parametrize(
    "text",
    [
        "computed behind the last token",
        "the client is told",
        "it tells the loss",
        "1.7x beside llama.cpp",
        "compiled anew",
        "whoever waits",
        "nobody starves",
        "so many tokens",
        "timed in turns",
        "this is no decoder",
        "the run goes on",
        "it resumes to the bit",
        "every so-manieth tile",
        "a model that is to be served",
        "what the tokenizer makes of it",
        "a page of the KV cache",
        "its pages are free",
        "tokens that are guessed",
        "the token is drawn",
        "draws the next token",
        "the product of x and w",
        "the powers are summed",
        "computed in pieces",
        "the remedy",
        "an exact kernel",
        "exactness holds",
        "PyTorch stands in.",
        "the held-out loss",
        "the masters are float32",
        "80 % of the limit",
    ],
)
def test_each_banned_word_is_found(text: str) -> None:
    assert prose.find_words(PATH, iter([Passage(1, text)]))


@pytest.mark.parametrize(
    "text",
    [
        "behind a proxy",
        "behind a reverse proxy",
        "it is no longer open",
        "exactly one of them",
        "an exact match",
        "powers of two",
        "the dot product of q and k",
        "master weights",
        "so many that the queue overflows",
        "`so many` in code",
        "the rate limit",
        "the beginning",
        "a documentation page",
    ],
)
def test_ordinary_uses_are_allowed(text: str) -> None:
    assert not prose.find_words(PATH, iter([Passage(1, text)]))


def test_a_phrase_is_found_across_a_line_break() -> None:
    assert words(iter([Passage(5, "one\nit goes\non")])) == [(6, "goes on")]
    assert words(prose.comments("x = 1\n# it goes\n# on\n")) == [(2, "goes on")]


PYTHON = '''"""Module: anew."""

def goes_on() -> None:
    """Function: told."""
    # Comment: beside.
    log.warning("message: %s behind", 1)
    what = f"assigned: {1} whoever"
    raise IngotError("raised: nobody", hint=f"hint: {2} pieces")


LIMIT = 3
"""Attribute: held out."""
'''


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (prose.docstrings, {(1, "anew"), (4, "told"), (12, "held out")}),
        (prose.comments, {(5, "beside")}),
        (prose.names, {(3, "goes on")}),
        (prose.messages, {(6, "behind"), (7, "whoever"), (8, "nobody"), (8, "pieces")}),
    ],
)
def test_a_word_is_found_in_its_kind_of_text_alone(
    select: Callable[[str], Iterator[Passage]], expected: set[tuple[int, str]]
) -> None:
    assert set(words(select(PYTHON))) == expected


def test_markdown_is_searched_without_its_code_blocks() -> None:
    assert words(prose.markdown("```\ngoes on\n```\nit goes on\n")) == [(4, "goes on")]


def test_cpp_comments_and_strings_are_distinguished() -> None:
    code = '// behind\n/* anew */ check(x, "nobody");  // beside "told"\n'
    assert set(words(prose.cpp_comments(code))) == {
        (1, "behind"),
        (2, "anew"),
        (2, "told"),
        (2, "beside"),
    }
    assert words(prose.cpp_strings(code)) == [(2, "nobody")]
