"""The chat format of a model: its template, how it calls tools, and how it reasons.

    chat = ChatFormat(tokenizer)
    prompt = chat.render(messages, tools)
    grammar = chat.grammar({"f": schema}, required=True)
    parser = chat.parser(prompt, True)

Everything is found in the tokenizer and its template; there are no settings per model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ingot.interop.chat import Message
from ingot.interop.tokenizer import Tokenizer
from ingot.interop.tool_format import find_tool_format, with_tools_as_text
from ingot.serving.engine.reply import END_THINK, THINK, ReplyParser
from ingot.serving.engine.sampling_params import Grammar
from ingot.serving.engine.tools import tool_grammar


class ChatFormat:
    """How conversations with a model are written."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        source = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
        self.tools = find_tool_format(source)
        self.reasoning = END_THINK in source or tokenizer.inner.token_to_id(END_THINK) is not None
        """Whether replies may begin with reasoning."""
        self._has_tools = "tools" in source
        self._has_calls = "tool_calls" in source
        written = (self.tools.start, self.tools.middle, self.tools.separator, self.tools.end)
        markers = " ".join((*written, THINK, END_THINK))
        self.visible = tuple(token for token in tokenizer.special_token_ids if token in markers)
        """Special tokens that are part of the format."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation, up to the reply."""
        if not self._has_tools or not self._has_calls:
            described = tools if not self._has_tools and tools else ()
            messages = with_tools_as_text(messages, described, self.tools)
        return self._tokenizer.render_chat(messages, tools, **variables)

    def grammar(
        self,
        functions: Mapping[str, Mapping[str, Any] | None],
        prompt: str = "",
        *,
        required: bool = False,
        parallel: bool = True,
        content_schema: Mapping[str, Any] | None = None,
    ) -> Grammar:
        """Return the grammar of a reply that may call these functions: see `tool_grammar`."""
        return tool_grammar(
            self.tools,
            functions,
            self._tokenizer,
            required=required,
            parallel=parallel,
            content_schema=content_schema,
            in_reasoning=self._in_reasoning(prompt),
        )

    def parser(self, prompt: str, tools: bool) -> ReplyParser:
        """Return a parser of the reply to this prompt, which may call `tools`."""
        return ReplyParser(
            tools=self.tools if tools else None,
            reasoning=self.reasoning,
            in_reasoning=self._in_reasoning(prompt),
        )

    def _in_reasoning(self, prompt: str) -> bool:
        """Whether the template has begun the reasoning."""
        return self.reasoning and prompt.rstrip().endswith(THINK)
