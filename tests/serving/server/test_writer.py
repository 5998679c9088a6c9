"""Formats of replies: the events of a stream join to the whole body."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ingot.interop.tool_format import HERMES
from ingot.serving.engine.detokenizer import TokenTexts
from ingot.serving.engine.output import Logprob, Output
from ingot.serving.engine.reply import ReplyParser
from ingot.serving.engine.request import FinishReason
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.server.completion import CompletionStream, RequestContext
from ingot.serving.server.messages import MessagesWriter
from ingot.serving.server.metrics import Metrics
from ingot.serving.server.openai import GenerationJob
from ingot.serving.server.responses import ResponsesRequest, ResponsesWriter
from ingot.serving.server.writer import ChatWriter, Writer
from tests.serving.engine.test_detokenizer import TOKENIZER
from tests.serving.server.test_completion import FakeEngine

TEXT = "<think>\nHm</think>\n\nLet me see." + HERMES.write([("f", '{"x": "é"}'), ("g", "{}")])
MakeWriter = Callable[[GenerationJob, TokenTexts], Writer]
RESPONSES = partial(ResponsesWriter, ResponsesRequest(input="Hello"))


def generate(make: MakeWriter, stream: bool, logprobs: int | None = None) -> Any:
    """Return the body, or the events of a stream, of a reply with all kinds of parts."""

    async def run() -> Any:
        job = GenerationJob(
            **{"model": "m", "prompts": [(1, 2)], "echo": [], "n": 1, "max_tokens": 999},
            sampling_params=SamplingParams(logprobs=logprobs),
            stream=stream,
            parser=lambda: ReplyParser(tools=HERMES, reasoning=True),
        )
        context = RequestContext(engine=FakeEngine(), tokenizer=TOKENIZER, metrics=Metrics())  # pyright: ignore
        completion = CompletionStream(make(job, TokenTexts(TOKENIZER)), context)
        (choice,) = completion.choices
        for token in TOKENIZER.encode(TEXT):
            one = (Logprob(token, -0.5, ()),) if logprobs is not None else None
            choice.on_output(Output(choice.id, (token,), one), 1.0)
        choice.on_output(Output(choice.id, finish_reason=FinishReason.STOP), 1.0)
        return b"".join(completion.out) if stream else json.loads(completion.body())

    found = asyncio.run(run())
    if not stream:
        return found
    rows = [row.rpartition("data: ")[2] for row in found.decode().split("\n\n") if row]
    return [json.loads(row) for row in rows if row != "[DONE]"]


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_chat(logprobs: int | None) -> None:
    whole = generate(ChatWriter, False, logprobs)["choices"][0]
    message = whole["message"]
    assert message["content"] == "Let me see."
    assert message["reasoning_content"] == "Hm"
    calls = [call["function"] for call in message["tool_calls"]]
    assert calls == [{"name": "f", "arguments": '{"x": "é"}'}, {"name": "g", "arguments": "{}"}]
    assert whole["finish_reason"] == "tool_calls"
    choices = [event["choices"][0] for event in generate(ChatWriter, True, logprobs)]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm"
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see."
    parts = [call for delta in deltas for call in delta.get("tool_calls", ())]
    for index, call in enumerate(calls):
        own = [part["function"] for part in parts if part["index"] == index]
        assert own[0] == {"name": call["name"], "arguments": ""}
        assert "".join(part["arguments"] for part in own) == call["arguments"]
    assert choices[-1]["finish_reason"] == "tool_calls"
    if logprobs is not None:
        sent = [one for choice in choices for one in (choice["logprobs"] or {}).get("content", ())]
        assert sent == whole["logprobs"]["content"]
        assert len(sent) == len(TOKENIZER.encode(TEXT))


def test_messages() -> None:
    whole = generate(MessagesWriter, False)
    thinking, text, *calls = whole["content"]
    assert (thinking["thinking"], text["text"]) == ("Hm", "Let me see.")
    assert [(call["name"], call["input"]) for call in calls] == [("f", {"x": "é"}), ("g", {})]
    assert whole["stop_reason"] == "tool_use"
    events = generate(MessagesWriter, True)
    starts = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert [start["type"] for start in starts] == ["thinking", "text", "tool_use", "tool_use"]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1, 2, 3]
    joined = ["", "", "", ""]
    for one in events:
        if one["type"] == "content_block_delta":
            kind = one["delta"]["type"]
            field = {"thinking_delta": "thinking", "text_delta": "text"}.get(kind, "partial_json")
            joined[one["index"]] += one["delta"][field]
    assert joined == ["Hm", "Let me see.", '{"x": "é"}', "{}"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_responses() -> None:
    whole = generate(RESPONSES, False)
    reasoning, message, *calls = whole["output"]
    assert reasoning["content"][0]["text"] == "Hm"
    assert message["content"][0]["text"] == "Let me see."
    assert [call["arguments"] for call in calls] == ['{"x": "é"}', "{}"]
    events = generate(RESPONSES, True)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"] == done
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in added] == [item["id"] for item in done]
    assert all(not item.get("content") and not item.get("arguments") for item in added)
