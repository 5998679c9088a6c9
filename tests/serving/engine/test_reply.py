"""Parts of replies: the same however the text is divided."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.interop.tool_format import FORMATS, LLAMA3, ToolFormat
from ingot.serving.engine.reply import Delta, ReplyParser

Calls = list[tuple[str, str]]


def parse(parser: ReplyParser, chunks: list[str]) -> tuple[str, str, Calls]:
    """Return reasoning, content and calls."""
    deltas: list[Delta] = []
    for chunk in chunks:
        deltas += parser.feed(chunk)
    deltas += parser.finish()
    names = [delta.text for delta in deltas if delta.kind == "call"]
    arguments = [
        "".join(d.text for d in deltas if d.kind == "arguments" and d.call == index)
        for index in range(len(names))
    ]
    reasoning, content = (
        "".join(d.text for d in deltas if d.kind == kind) for kind in ("reasoning", "content")
    )
    return reasoning, content, list(zip(names, arguments, strict=True))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
arguments = st.dictionaries(st.text(max_size=5), values, max_size=3).map(json.dumps)
calls = st.lists(st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), arguments), max_size=3)
words = st.text(alphabet="ab {}<>/\n", max_size=12)


@given(
    format=st.sampled_from(FORMATS),
    thoughts=st.none() | words,
    content=words,
    given_calls=calls,
    data=st.data(),
)
def test_parts_do_not_depend_on_how_the_text_is_divided(
    format: ToolFormat,
    thoughts: str | None,
    content: str,
    given_calls: Calls,
    data: st.DataObject,
) -> None:
    if not format.trigger:  # a call is the whole reply, and a text does not begin with a brace
        content = "" if given_calls else content.replace("{", "")
    content = content.strip("\n") if thoughts is not None else content.lstrip()
    text = content + (format.write(given_calls) if given_calls else "")
    if thoughts is not None:
        thoughts = thoughts.strip("\n")
        text = f"<think>\n{thoughts}</think>\n\n{text}"
    size = max(1, len(text))
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=8)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    found = parse(ReplyParser(tools=format, reasoning=True), chunks)
    assert found == (thoughts or "", content, given_calls)


@pytest.mark.parametrize("format", FORMATS, ids=lambda one: one.name)
def test_arguments_are_sent_as_they_come(format: ToolFormat) -> None:
    parser = ReplyParser(tools=format)
    text = format.write([("f", '{"city": "Oslo"}')])
    head = text[: text.index("city")]
    assert parser.feed(head) == [Delta("call", "f"), Delta("arguments", '{"')]
    assert parser.feed("city") == [Delta("arguments", "city")]


def test_a_call_that_is_cut_off_has_the_arguments_so_far() -> None:
    text = FORMATS[-1].write([("f", '{"x": "abc"}')])
    _, content, found = parse(ReplyParser(tools=FORMATS[-1]), [text[: text.index("bc")]])
    assert (content, found) == ("", [("f", '{"x": "a')])


def test_reasoning_that_the_template_began() -> None:
    parser = ReplyParser(reasoning=True, in_reasoning=True)
    assert parse(parser, ["Hm</th", "ink>", "\n\nYes"]) == ("Hm", "Yes", [])
    assert parse(ReplyParser(reasoning=True, in_reasoning=True), ["Hm"]) == ("Hm", "", [])


def test_without_tools_a_marker_is_text() -> None:
    assert parse(ReplyParser(), ["<tool_call>", "{}"]) == ("", "<tool_call>{}", [])
    assert parse(ReplyParser(tools=LLAMA3), ["a {", "}"]) == ("", "a {}", [])
