"""Formats of tool calls, and messages for templates without tools."""

from __future__ import annotations

from typing import Any

import pytest

from ingot.interop.tool_format import (
    FORMATS,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    MISTRAL_SPACED,
    SMOLLM2,
    ToolFormat,
    find_tool_format,
    with_tools_as_text,
)

CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ('{{- "[TOOL_CALLS] [" }}', MISTRAL_SPACED),
        ("{{- '[TOOL_CALLS][' }}", MISTRAL),
        ("[TOOL_CALLS]' + name + '[ARGS]'", MISTRAL_ARGS),
        ("<tool_call>\\n", HERMES),
        ('Respond in the format {"name": function name, "parameters": dictionary}', LLAMA3),
        ("{{ messages[0].content }}", SMOLLM2),
    ],
)
def test_the_format_is_found_in_the_template(template: str, format: ToolFormat) -> None:
    assert find_tool_format(template) is format


def test_a_start_begins_with_its_trigger() -> None:
    assert all(one.start.startswith(one.trigger) for one in FORMATS)
    assert LLAMA3.write([("f", "{}"), ("g", "{}")]) == (
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}'
    )


def test_a_template_without_tools_gets_them_as_text() -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "a"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    system, user, assistant, tool = with_tools_as_text(messages, tools, SMOLLM2)
    assert system["content"].startswith("Be brief.\n\n")
    assert '{"type": "function", "function": {"name": "f"}}' in system["content"]
    assert assistant["content"] == ('<tool_call>[{"name": "f", "arguments": {"x": 1}}]</tool_call>')
    assert (user, tool) == (messages[1], messages[3])
    first = with_tools_as_text(messages[1:2], tools, SMOLLM2)[0]
    assert first["role"] == "system"
