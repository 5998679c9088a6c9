"""Chat templates: format messages as the text a model was trained on.

A template is an untrusted Jinja program that comes with the weights. Jinja's sandbox keeps it from
Python's internals, but not from nested `{% for a in range(99999) %}`, nor from `'a' * 10**10`.
So templates are rendered in a process with a memory limit (`ingot.core.sandbox`), which is killed
after a timeout. It starts at the first use and stays. Measured with SmolLM2's template on a Xeon:
0.12 s to start, 20 MB, and 0.17 ms for a rendering that takes 0.02 ms in this process.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ingot.core.errors import IngotError
from ingot.core.sandbox import START_SECONDS, Sandbox

MAX_TEMPLATE = 1 << 18  # characters; the longest in use have about 30 thousand
MAX_CHARACTERS = 1 << 24  # of the messages as JSON, and of the rendered text
MAX_MEMORY = 1 << 29  # bytes
SECONDS = 2.0

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]

_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")


class ChatError(IngotError):
    """A chat template that is missing or invalid, or that rejects the messages."""


class ChatTemplate:
    """A template and the process that renders it.

    >>> template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    >>> template.render([{"role": "user", "content": "Hello"}])
    '<user>Hello'
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE:
            raise _invalid(f"it has {len(source):,} characters, more than {MAX_TEMPLATE:,}")
        self.source = source
        self._lock = threading.Lock()
        self._renderer: Sandbox | None = None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Render the messages.

        `tools` are JSON schemas of functions. `add_generation_prompt` appends the beginning of an
        assistant message. Other variables are specific to the template, such as `enable_thinking`.
        """
        return self._ask(messages, tools, add_generation_prompt, variables)["text"]

    @property
    def has_generation(self) -> bool:
        """Whether the template marks the assistant's words with `{% generation %}`."""
        return _GENERATION.search(self.source) is not None

    def render_with_spans(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[str, Spans]:
        """Render a whole conversation; return also where `{% generation %}` begins and ends.

        >>> source = "{% for m in messages %}:{% generation %}{{ m.content }}{% endgeneration %}"
        >>> template = ChatTemplate(source + "{% endfor %}")
        >>> template.render_with_spans([{"role": "assistant", "content": "Hello"}])
        (':Hello', [(1, 6)])
        """
        answer = self._ask(messages, tools, False, variables)
        if answer["spans"] is None:
            raise _invalid("{% generation %} is used inside a macro, so its place is unknown")
        return answer["text"], [(begin, end) for begin, end in answer["spans"]]

    def _ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> dict[str, Any]:
        inputs = {
            "messages": [_with_parsed_arguments(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            content = json.dumps(inputs)
        except (TypeError, ValueError, RecursionError) as error:
            raise ChatError(
                f"the messages are not JSON-serializable: {error}",
                hint="use strings, numbers, lists and dictionaries",
            ) from error
        if len(content) > MAX_CHARACTERS:
            raise ChatError(
                f"the messages have {len(content):,} characters, more than {MAX_CHARACTERS:,}",
                hint="shorten the messages",
            )
        with self._lock:
            return self._send(content)

    def _send(self, content: str) -> dict[str, Any]:
        if self._renderer is None or not self._renderer.alive():
            script = Path(__file__).with_name("renderer.py")
            renderer = Sandbox(script, SECONDS, MAX_CHARACTERS, MAX_MEMORY)
            # Before the process is kept, so that a compile error is raised at every use.
            _checked(renderer.ask(json.dumps(self.source), START_SECONDS))
            self._renderer = renderer
        answer = self._renderer.ask(content, SECONDS)
        if answer is None or ("error" in answer and not answer["rejected"]):
            self._renderer = None  # a new one next time: this one may be out of memory
        return _checked(answer)


def _with_parsed_arguments(message: Message) -> Message:
    """Return the message with the arguments of its tool calls as objects.

    OpenAI's API gives them as a JSON string, templates expect the object.

    >>> call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    >>> _with_parsed_arguments({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    [{'type': 'function', 'function': {'name': 'f', 'arguments': {'x': 1}}}]
    """
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parse_call(call) for call in cast(list[Any], calls)]}


def _parse_call(call: Any) -> Any:
    try:
        arguments: Any = json.loads(call["function"]["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**call["function"], "arguments": cast(Any, arguments)}}


def _checked(answer: dict[str, Any] | None) -> dict[str, Any]:
    if answer is None:
        raise _invalid(f"it does not finish within {SECONDS:.0f} s, or crashes its process")
    if "error" not in answer:
        return answer
    if answer["rejected"]:
        raise ChatError(
            f"the model's chat template rejects the messages: {answer['error']}",
            hint="change the messages accordingly",
        )
    raise _invalid(answer["error"])


def _invalid(why: str) -> ChatError:
    return ChatError(
        f"the model's chat template is invalid: {why}",
        hint="correct chat_template in tokenizer_config.json, or complete plain text with "
        "`ingot generate`",
    )
