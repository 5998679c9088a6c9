"""Parts of a chat reply: reasoning, content and tool calls, from text as it is generated.

    parser = ReplyParser(tools=HERMES)
    parser.feed('Let me see. <tool_call>\\n{"name": "f", "argu')    # content, nothing else yet
    parser.feed('ments": {"x": 1}}\\n</tool_call>')                 # a call and its arguments

Text is held back only while it may be the beginning of a marker, so the parts are the same however
the text is divided.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from ingot.interop.tool_format import ToolFormat
from ingot.serving.engine.detokenizer import find_partial_stop

THINK, END_THINK = "<think>", "</think>"


class Delta(NamedTuple):
    """New text of a part of a reply."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str
    """For a call, the name of the function."""
    call: int = 0
    """Index of the tool call."""


class ReplyParser:
    """Divides one reply.

    >>> from ingot.interop.tool_format import SMOLLM2
    >>> parser = ReplyParser(tools=SMOLLM2)
    >>> for delta in parser.feed('Ok<tool_call>[{"name": "f", "arguments": {}}]</tool_call>'):
    ...     print(*delta)
    content Ok 0
    call f 0
    arguments {} 0
    >>> ReplyParser(reasoning=True).feed("<think>Hm</think>Yes")
    [Delta(kind='reasoning', text='Hm', call=0), Delta(kind='content', text='Yes', call=0)]
    """

    def __init__(
        self,
        *,
        tools: ToolFormat | None = None,
        reasoning: bool = False,
        in_reasoning: bool = False,
    ) -> None:
        self.num_calls = 0
        self._tools = tools
        self._held = ""
        self._deltas: list[Delta] = []
        self._json = _JsonEnd()
        self._answer = self._plain
        if tools is not None:
            self._answer = self._content if tools.trigger else self._call_or_content
        self._state = self._reasoning_or_answer if reasoning else self._answer
        if in_reasoning:
            self._begin_reasoning()

    def feed(self, text: str) -> list[Delta]:
        """Add text; return what is certain now."""
        self._held += text
        while self._held and self._state():
            pass
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> list[Delta]:
        """Return what was held back, after the last text; the beginning of a call is dropped."""
        held, self._held = self._held, ""
        if not held or self._state in (self._start, self._name, self._after_arguments):
            return []
        kind = "reasoning" if self._state == self._reasoning else "content"
        return [Delta(kind, held)]

    # States: each takes some of the held text and returns whether the next state should continue

    def _reasoning_or_answer(self) -> bool:
        text = self._held.lstrip()
        if text.startswith(THINK):
            self._held = text[len(THINK) :]
            self._begin_reasoning()
        elif THINK.startswith(text):
            return False
        else:
            self._state = self._answer
        return True

    def _begin_reasoning(self) -> None:
        self._state, self._after_blank = self._blank, self._reasoning

    def _blank(self) -> bool:
        """Drop blank lines around reasoning."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = self._after_blank
        return bool(self._held)

    def _reasoning(self) -> bool:
        self._after_blank = self._answer
        return self._emit_until(END_THINK, "reasoning", self._blank)

    def _content(self) -> bool:
        assert self._tools is not None
        return self._emit_until(self._tools.trigger, "content", self._start)

    def _emit_until(
        self, marker: str, kind: Literal["content", "reasoning"], then: Callable[[], bool]
    ) -> bool:
        text, found, rest = self._held.partition(marker)
        if not found:
            keep = find_partial_stop(self._held, marker)
            text, rest = self._held[:keep], self._held[keep:]
        if text:
            self._deltas.append(Delta(kind, text))
        self._held = rest
        if found:
            self._state = then
        return bool(found)

    def _call_or_content(self) -> bool:
        """Decide by the first character: the format has no trigger."""
        self._state = self._name if self._held.startswith("{") else self._plain
        return True

    def _plain(self) -> bool:
        self._deltas.append(Delta("content", self._held))
        self._held = ""
        return False

    def _start(self) -> bool:
        assert self._tools is not None
        return self._take(self._tools.start.removeprefix(self._tools.trigger), self._name)

    def _take(self, literal: str, then: Callable[[], bool]) -> bool:
        """Take text that the grammar prescribes."""
        if len(self._held) < len(literal):
            return False
        self._held, self._state = self._held[len(literal) :], then
        return True

    def _name(self) -> bool:
        assert self._tools is not None
        before, found, rest = self._held.partition(self._tools.middle)
        if found:
            name = before.removeprefix(self._tools.open)
            self._deltas.append(Delta("call", name, self.num_calls))
            self.num_calls += 1
            self._held, self._state, self._json = rest, self._arguments, _JsonEnd()
        return bool(found)

    def _arguments(self) -> bool:
        end = self._json.find(self._held)
        text = self._held if end is None else self._held[:end]
        self._deltas.append(Delta("arguments", text, self.num_calls - 1))
        self._held = self._held[len(text) :]
        if end is not None:
            self._state = self._after_arguments
        return end is not None

    def _after_arguments(self) -> bool:
        assert self._tools is not None
        another = self._tools.close + self._tools.separator
        if self._held.startswith(another):
            self._held, self._state = self._held[len(another) :], self._name
            return True
        end = self._tools.close + self._tools.end
        if another.startswith(self._held) or not self._held.startswith(end):
            return False
        self._held, self._state = self._held[len(end) :], self._plain
        return True


class _JsonEnd:
    """Finds the end of a JSON object in text that arrives in parts.

    >>> end = _JsonEnd()
    >>> end.find('{"a": "}'), end.find('"}, 1')
    (None, 2)
    """

    def __init__(self) -> None:
        self._depth, self._quoted, self._escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """Return the position after the object, or None if it continues."""
        for index, char in enumerate(text):
            if self._quoted:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._quoted = False
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return index + 1
        return None
