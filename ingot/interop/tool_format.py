"""How families of models write tool calls.

A format is data: a reply with tool calls is

    START CALL (SEPARATOR CALL)* END        where CALL is    OPEN name MIDDLE arguments CLOSE

and the format of a model is found by a marker in its chat template. A template without tools gets
them in its system message, as `Hermes` and SmolLM2 models were trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ingot.interop.chat import Message


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """The text of tool calls.

    >>> print(HERMES.write([("f", '{"x": 1}')]))
    <tool_call>
    {"name": "f", "arguments": {"x": 1}}
    </tool_call>
    """

    name: str
    marker: str
    """Text of chat templates in this format."""
    trigger: str
    """Beginning of `start` that a model writes only before a call. Empty: a reply that begins with
    a brace is a call."""
    start: str
    separator: str
    end: str
    open: str = '{"name": "'
    middle: str = '", "arguments": '
    close: str = "}"

    def write(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return the text of calls: names, and arguments as JSON."""
        texts = [f"{self.open}{name}{self.middle}{args}{self.close}" for name, args in calls]
        return f"{self.start}{self.separator.join(texts)}{self.end}"


MISTRAL_ARGS = ToolFormat(
    name="mistral-args",
    marker="[ARGS]",
    trigger="[TOOL_CALLS]",
    start="[TOOL_CALLS]",
    separator="[TOOL_CALLS]",
    end="",
    open="",
    middle="[ARGS]",
    close="",
)
MISTRAL_SPACED = ToolFormat(
    name="mistral-spaced",
    marker="[TOOL_CALLS] [",
    trigger="[TOOL_CALLS]",
    start="[TOOL_CALLS] [",
    separator=", ",
    end="]",
)
MISTRAL = ToolFormat(
    name="mistral",
    marker="[TOOL_CALLS]",
    trigger="[TOOL_CALLS]",
    start="[TOOL_CALLS][",
    separator=", ",
    end="]",
)
HERMES = ToolFormat(
    name="hermes",
    marker="<tool_call>",
    trigger="<tool_call>",
    start="<tool_call>\n",
    separator="\n</tool_call>\n<tool_call>\n",
    end="\n</tool_call>",
)
LLAMA3 = ToolFormat(
    name="llama3",
    marker='"parameters": ',
    trigger="",
    start="",
    separator="; ",
    end="",
    middle='", "parameters": ',
)
SMOLLM2 = ToolFormat(
    name="smollm2",
    marker="",
    trigger="<tool_call>",
    start="<tool_call>[",
    separator=", ",
    end="]</tool_call>",
)
FORMATS = (MISTRAL_ARGS, MISTRAL_SPACED, MISTRAL, HERMES, LLAMA3, SMOLLM2)
"""In the order in which markers are looked for; the last is that of templates without tools."""

_INSTRUCTIONS = """\
You can call functions. These are the functions, as JSON schemas:
<tools>{tools}</tools>

To call one or more of them, reply with nothing but a list of calls:
<tool_call>[{{"name": "function_name", "arguments": {{"argument": "value"}}}}]</tool_call>"""


def find_tool_format(template: str) -> ToolFormat:
    """Return the format of a chat template.

    >>> find_tool_format("{{ '<tool_call>' }}").name, find_tool_format("{{ messages }}").name
    ('hermes', 'smollm2')
    """
    return next(one for one in FORMATS if one.marker in template)


def with_tools_as_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], format: ToolFormat
) -> list[Message]:
    """Return messages for a template that knows no tools: they are described in the system message,
    and calls are part of the content.

    >>> with_tools_as_text([{"role": "user", "content": "Hi"}], [], SMOLLM2)
    [{'role': 'user', 'content': 'Hi'}]
    """
    plain = [_with_calls_as_text(message, format) for message in messages]
    if not tools:
        return plain
    instructions = _INSTRUCTIONS.format(tools=json.dumps(list(tools)))
    if plain[0].get("role") != "system":
        return [{"role": "system", "content": instructions}, *plain]
    system = f"{plain[0].get('content') or ''}\n\n{instructions}"
    return [{**plain[0], "content": system}, *plain[1:]]


def _with_calls_as_text(message: Message, format: ToolFormat) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    content = f"{message.get('content') or ''}{format.write(written)}"
    return {"role": message["role"], "content": content}
