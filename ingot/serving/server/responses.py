"""OpenAI's Responses API, `/v1/responses`: translated to a chat, and its format of replies.

Responses are not stored: a client sends the whole conversation as `input`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from ingot.serving.engine.detokenizer import TokenTexts
from ingot.serving.server.blocks import BlockWriter, ReplyBlock, blocks_of, event
from ingot.serving.server.errors import ApiError
from ingot.serving.server.openai import (
    MAX_MESSAGES,
    MAX_TOKENS,
    MAX_TOOLS,
    ChatRequest,
    Function,
    FunctionName,
    GenerationJob,
    JsonObject,
    ShortText,
    Strict,
    Text,
)
from ingot.serving.server.writer import Reply, Usage, encode


class InputText(Strict):
    """Text of a message."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text
    annotations: Any = None
    logprobs: Any = None


_Texts = Text | Annotated[list[InputText], Field(max_length=1024)]


class ResponsesMessage(Strict):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: _Texts
    id: Any = None
    status: Any = None
    phase: Any = None


class FunctionCall(Strict):
    """A tool call of an earlier response."""

    type: Literal["function_call"]
    call_id: ShortText
    name: ShortText
    arguments: Text
    id: Any = None
    status: Any = None
    namespace: Any = None
    caller: Any = None
    async_: Any = Field(default=None, alias="async")


class FunctionCallOutput(Strict):
    """The result of a tool call."""

    type: Literal["function_call_output"]
    call_id: ShortText
    output: _Texts
    id: Any = None
    status: Any = None


class ReasoningItem(Strict):
    """Reasoning of an earlier response; not sent to the model again."""

    type: Literal["reasoning"]
    content: Annotated[list[InputText], Field(max_length=1024)] | None = None
    summary: Any = None
    id: Any = None
    status: Any = None
    encrypted_content: Any = None


class ResponsesTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class ResponsesToolChoice(FunctionName):
    """A `tool_choice` of one function."""

    type: Literal["function"]


class TextFormat(Strict):
    """The format of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: ShortText = ""
    description: Annotated[str, Field(max_length=4096)] | None = None
    schema_: JsonObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """`text`: options of the text."""

    format: TextFormat | None = None
    verbosity: Any = None


class ResponsesRequest(Strict):
    """The body of `/v1/responses`."""

    model: ShortText = ""
    input: (
        Text
        | Annotated[
            list[FunctionCall | FunctionCallOutput | ReasoningItem | ResponsesMessage],
            Field(min_length=1, max_length=MAX_MESSAGES),
        ]
    )
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    prompt_cache_key: ShortText | None = None

    # Ignored: they do not change the output.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    reasoning: Any = None
    include: Any = None
    stream_options: Any = None
    truncation: Literal["disabled"] | None = None

    # Only without a value: responses are not stored.
    previous_response_id: None = None
    conversation: None = None
    background: Literal[False] | None = None

    def to_chat(self) -> ChatRequest:
        """Return the chat that this request means."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "tools": [_function(tool) for tool in self.tools or ()],
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "prompt_cache_key": self.prompt_cache_key,
            "user": self.user,
            "safety_identifier": self.safety_identifier,
        }
        if isinstance(self.tool_choice, ResponsesToolChoice):
            name = {"name": self.tool_choice.name}
            fields["tool_choice"] = {"type": "function", "function": name}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _response_format(self.text.format)
        return ChatRequest.model_validate(fields)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            if isinstance(item, ResponsesMessage):
                messages.append({"role": item.role, "content": _text(item.content)})
            elif isinstance(item, FunctionCallOutput):
                result = {"role": "tool", "tool_call_id": item.call_id}
                messages.append({**result, "content": _text(item.output)})
            elif isinstance(item, FunctionCall):
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
        return messages or [{"role": "user", "content": ""}]


class ResponsesWriter(BlockWriter):
    """The format of `/v1/responses`."""

    prefix = "resp_"

    def __init__(
        self, request: ResponsesRequest, job: GenerationJob, token_texts: TokenTexts
    ) -> None:
        super().__init__(job, token_texts)
        self._request = request
        self._number = 0

    def begin(self, reply: Reply) -> bytes:
        """Return the events that start the response."""
        response = self._response("in_progress", [], None)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def open_block(self, reply: Reply, block: ReplyBlock) -> bytes:
        """Return the events that add an output item."""
        empty = Reply(0, calls=[type(call)(call.name, call.id) for call in reply.calls])
        item = self._item(empty, block, self.num_blocks - 1, "in_progress")
        added = self._event("response.output_item.added", **self._place(), item=item)
        if block.kind == "call":
            return added
        part = _part(block, "")
        return added + self._part_event("response.content_part.added", block, part=part)

    def block_delta(self, reply: Reply, block: ReplyBlock, text: str) -> bytes:
        """Return the event of new text."""
        if block.kind == "call":
            place = {**self._place(), "item_id": self._item_id(block)}
            return self._event("response.function_call_arguments.delta", **place, delta=text)
        if block.kind == "reasoning":
            return self._part_event("response.reasoning_text.delta", block, delta=text)
        return self._part_event("response.output_text.delta", block, delta=text, logprobs=[])

    def close_block(self, reply: Reply, block: ReplyBlock) -> bytes:
        """Return the events that complete an output item."""
        item = self._item(reply, block, self.num_blocks - 1, "completed")
        if block.kind == "call":
            place = {**self._place(), "item_id": self._item_id(block)}
            given = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **place, **given)]
        else:
            events = self._close_part(block, item["content"][0]["text"])
        events.append(self._event("response.output_item.done", **self._place(), item=item))
        return b"".join(events)

    def _close_part(self, block: ReplyBlock, text: str) -> list[bytes]:
        if block.kind == "reasoning":
            done = self._part_event("response.reasoning_text.done", block, text=text)
        else:
            done = self._part_event("response.output_text.done", block, text=text, logprobs=[])
        part = _part(block, text)
        return [done, self._part_event("response.content_part.done", block, part=part)]

    def end(self, replies: Sequence[Reply], usage: Usage) -> bytes:
        """Return the event of the whole response."""
        response = self._whole(replies, usage)
        return self._event(f"response.{response['status']}", response=response)

    def body(self, replies: Sequence[Reply], usage: Usage) -> bytes:
        """Return the whole response."""
        return encode(self._whole(replies, usage))

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return self._event("error", message=error.message, code=error.code, param=error.param)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **fields})

    def _place(self) -> dict[str, Any]:
        return {"output_index": self.num_blocks - 1}

    def _part_event(self, kind: str, block: ReplyBlock, **fields: Any) -> bytes:
        place = {**self._place(), "item_id": self._item_id(block), "content_index": 0}
        return self._event(kind, **place, **fields)

    def _item_id(self, block: ReplyBlock, index: int | None = None) -> str:
        prefix = {"reasoning": "rs", "content": "msg", "call": "fc"}[block.kind]
        number = self.num_blocks - 1 if index is None else index
        return f"{prefix}_{self.id.removeprefix(self.prefix)}_{number}"

    def _whole(self, replies: Sequence[Reply], usage: Usage) -> dict[str, Any]:
        (reply,) = replies
        status = "incomplete" if reply.finish_reason == "length" else "completed"
        blocks = enumerate(blocks_of(reply))
        items = [self._item(reply, block, index, status) for index, block in blocks]
        return self._response(status, items, usage)

    def _item(self, reply: Reply, block: ReplyBlock, index: int, status: str) -> dict[str, Any]:
        fields: dict[str, Any] = {"id": self._item_id(block, index), "status": status}
        if block.kind == "call":
            call = reply.calls[block.call]
            names = {"call_id": call.id, "name": call.name}
            arguments = "".join(call.arguments)
            return {"type": "function_call", **fields, **names, "arguments": arguments}
        if block.kind == "reasoning":
            parts = [_part(block, "".join(reply.reasoning))] if reply.reasoning else []
            return {"type": "reasoning", **fields, "summary": [], "content": parts}
        parts = [_part(block, "".join(reply.content))] if reply.content else []
        return {"type": "message", **fields, "role": "assistant", "content": parts}

    def _response(
        self, status: str, items: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        request = self._request
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        choice = request.tool_choice or "auto"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata,
            "model": self.job.model,
            "output": items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": request.temperature,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_p": request.top_p,
            "store": False,
            "usage": None if usage is None else _usage(usage),
        }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }


def _part(block: ReplyBlock, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _function(tool: ResponsesTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_unset=True)}


def _response_format(format: TextFormat) -> dict[str, Any]:
    if format.type != "json_schema":
        return {"type": format.type}
    schema = {"name": format.name, "schema": format.schema_ or {}, "strict": format.strict}
    return {"type": "json_schema", "json_schema": schema}
