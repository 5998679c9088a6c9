"""Anthropic's Messages API, `/v1/messages`: translated to a chat, and its format of replies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ingot.serving.server.blocks import BlockWriter, ReplyBlock, blocks_of, event
from ingot.serving.server.errors import ApiError
from ingot.serving.server.openai import (
    MAX_MESSAGES,
    MAX_STOP_STRINGS,
    MAX_TOKENS,
    MAX_TOOLS,
    ChatRequest,
    JsonObject,
    ShortText,
    StopString,
    Strict,
    Text,
)
from ingot.serving.server.writer import Reply, Usage, encode

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class TextBlock(Strict):
    """Text of a message, of the system prompt or of a tool's result."""

    type: Literal["text"]
    text: Text
    cache_control: Any = None
    citations: Any = None


class ThinkingBlock(Strict):
    """Reasoning of an earlier reply."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text = ""


class ToolUseBlock(Strict):
    """A tool call of an earlier reply."""

    type: Literal["tool_use"]
    id: ShortText
    name: ShortText
    input: JsonObject
    cache_control: Any = None
    caller: Any = None


class ToolResultBlock(Strict):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: ShortText
    content: Text | Annotated[list[TextBlock], Field(max_length=1024)] = ""
    is_error: bool = False
    cache_control: Any = None


_Block = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]


class InputMessage(Strict):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[_Block], Field(max_length=1024)]

    def to_chat(self) -> list[dict[str, Any]]:
        """Return it as messages of a chat: results of tools are messages of their own."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        results: list[dict[str, Any]] = []
        calls: list[dict[str, Any]] = []
        fields: dict[str, Any] = {"role": self.role}
        for block in self.content:
            if isinstance(block, TextBlock):
                fields["content"] = fields.get("content", "") + block.text
            elif isinstance(block, ThinkingBlock):
                fields["reasoning_content"] = block.thinking
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            else:
                result = {"role": "tool", "tool_call_id": block.tool_use_id}
                results.append({**result, "content": _text(block.content)})
        if calls:
            fields["tool_calls"] = calls
        return [*results, fields] if len(fields) > 1 or not results else results


class MessagesTool(Strict):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: ShortText
    description: Annotated[str, Field(max_length=1 << 14)] | None = None
    input_schema: JsonObject
    cache_control: Any = None


class MessagesToolChoice(Strict):
    """Whether, and which, functions are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: ShortText | None = None
    disable_parallel_tool_use: bool = False


class JsonOutputFormat(Strict):
    """The schema of the reply."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Strict):
    """Options of the reply."""

    format: JsonOutputFormat | None = None
    effort: Any = None
    task_budget: Any = None


class MessagesRequest(Strict):
    """The body of `/v1/messages`."""

    model: ShortText
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)]
    system: Text | Annotated[list[TextBlock], Field(max_length=64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None

    metadata: JsonObject | None = None
    """`user_id`: requests of a user get the same version of the model."""

    # Ignored: they do not change the output.
    service_tier: Any = None
    thinking: Any = None
    cache_control: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    speed: Any = None

    def to_chat(self) -> ChatRequest:
        """Return the chat that this request means."""
        messages = [one for message in self.messages for one in message.to_chat()]
        if self.system:
            messages.insert(0, {"role": "system", "content": _text(self.system)})
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences or None,
            "stream": self.stream,
            "tools": [_function(tool) for tool in self.tools or ()],
            "user": self.metadata.get("user_id") if self.metadata else None,
        }
        if self.tool_choice is not None:
            fields["tool_choice"] = _tool_choice(self.tool_choice)
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"schema": self.output_config.format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return ChatRequest.model_validate(fields)


class MessagesWriter(BlockWriter):
    """The format of `/v1/messages`."""

    prefix = "msg_"

    def begin(self, reply: Reply) -> bytes:
        """Return the event that starts the message."""
        message = self._message(reply, [], Usage(len(reply.prompt), 0, 0))
        return event({"type": "message_start", "message": message})

    def open_block(self, reply: Reply, block: ReplyBlock) -> bytes:
        """Return the event that starts a content block."""
        fields = _block(Reply(0, calls=reply.calls), block, empty=True)
        start = {"type": "content_block_start", "index": self.num_blocks - 1}
        return event({**start, "content_block": fields})

    def block_delta(self, reply: Reply, block: ReplyBlock, text: str) -> bytes:
        """Return the event of new text."""
        delta = {
            "reasoning": {"type": "thinking_delta", "thinking": text},
            "content": {"type": "text_delta", "text": text},
            "call": {"type": "input_json_delta", "partial_json": text},
        }[block.kind]
        index = self.num_blocks - 1
        return event({"type": "content_block_delta", "index": index, "delta": delta})

    def close_block(self, reply: Reply, block: ReplyBlock) -> bytes:
        """Return the event that ends a content block."""
        return event({"type": "content_block_stop", "index": self.num_blocks - 1})

    def end(self, replies: Sequence[Reply], usage: Usage) -> bytes:
        """Return the events after the last block."""
        (reply,) = replies
        delta = {"type": "message_delta", "delta": _stop(reply), "usage": _usage(usage)}
        return event(delta) + event({"type": "message_stop"})

    def body(self, replies: Sequence[Reply], usage: Usage) -> bytes:
        """Return the whole message."""
        (reply,) = replies
        blocks = [_block(reply, block) for block in blocks_of(reply)]
        return encode(self._message(reply, blocks, usage))

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return b"event: error\n" + super().error(error)

    def _message(self, reply: Reply, blocks: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.job.model,
            "content": blocks,
            **_stop(reply),
            "usage": _usage(usage),
        }


def _block(reply: Reply, block: ReplyBlock, empty: bool = False) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": "".join(reply.reasoning), "signature": ""}
    if block.kind == "content":
        return {"type": "text", "text": "".join(reply.content)}
    call = reply.calls[block.call]
    arguments = _arguments("" if empty else "".join(call.arguments))
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _arguments(text: str) -> Any:
    """Return the arguments of a call; none of one that was cut off.

    >>> _arguments('{"x": 1}'), _arguments('{"x"')
    ({'x': 1}, {})
    """
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _stop(reply: Reply) -> dict[str, Any]:
    if reply.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop_string}
    reason = _STOP_REASONS.get(reply.finish_reason or "")
    return {"stop_reason": reason, "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _function(tool: MessagesTool) -> dict[str, Any]:
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _tool_choice(choice: MessagesToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
