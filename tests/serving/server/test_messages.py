"""`/v1/messages` with Anthropic's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from ingot.serving.server.messages import MessagesRequest
from tests.serving.conftest import Served
from tests.serving.server.tool_use import SCHEMAS, check_call

GREEDY = {"temperature": 0}  # older clients have it as an argument
USER: list[Any] = [{"role": "user", "content": "Hello"}]
TOOLS: list[Any] = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as made:
        yield made


def test_a_stream_joins_to_the_whole_message(client: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {
        "model": "small",
        "max_tokens": 20,
        "extra_body": GREEDY,
        "messages": USER,
    }
    whole = client.messages.create(**ask, system="Be brief.")
    with client.messages.stream(**ask, system=[{"type": "text", "text": "Be brief."}]) as s:
        joined = s.get_final_message()
    assert whole.content[0].type == "text"
    assert whole.content[0].text
    assert [b.model_dump() for b in joined.content] == [b.model_dump() for b in whole.content]
    assert joined.stop_reason == whole.stop_reason == "max_tokens"
    assert joined.usage.output_tokens == whole.usage.output_tokens == 20
    read = whole.usage.cache_read_input_tokens or 0
    assert whole.usage.input_tokens + read == len("<system>Be brief.<user>Hello<answer>")


def test_a_stop_sequence_is_named(client: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {
        "model": "small",
        "max_tokens": 9,
        "extra_body": GREEDY,
        "messages": USER,
    }
    text = client.messages.create(**ask).content[0]
    assert text.type == "text"
    message = client.messages.create(**ask, stop_sequences=[text.text[3]])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", text.text[3])


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tools_are_called(client: anthropic.Anthropic, choice: Any) -> None:
    ask: dict[str, Any] = {
        **{"model": "small", "max_tokens": 2000, "extra_body": GREEDY, "messages": USER},
        **{"tools": TOOLS, "tool_choice": {**choice, "disable_parallel_tool_use": True}},
    }
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        joined = stream.get_final_message()
    for message in (whole, joined):
        (call,) = message.content
        assert call.type == "tool_use"
        check_call(call.name, json.dumps(call.input))
        assert message.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "12 degrees"}
        conversation: list[Any] = [
            *USER,
            {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
            {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
        ]
        ask = {**ask, "max_tokens": 5, "messages": conversation, "tool_choice": {"type": "none"}}
        assert client.messages.create(**ask).stop_reason == "max_tokens"


def test_a_reply_may_have_a_schema(client: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {"model": "small", "max_tokens": 2000, "messages": USER}
    format = {"type": "json_schema", "schema": SCHEMAS["weather"]}
    (block,) = client.messages.create(**ask, output_config={"format": format}).content  # pyright: ignore
    assert block.type == "text"
    check_call("weather", block.text)


def test_errors_are_those_of_the_client(client: anthropic.Anthropic) -> None:
    ask: dict[str, Any] = {"model": "small", "max_tokens": 5, "messages": USER}
    with pytest.raises(anthropic.NotFoundError, match="model 'other' not found"):
        client.messages.create(**{**ask, "model": "other"})
    with pytest.raises(anthropic.UnprocessableEntityError, match=r"tools\.0\.function\.name"):
        client.messages.create(**ask, tools=[{"name": "a b", "input_schema": SCHEMAS["clock"]}])
    with pytest.raises(anthropic.UnprocessableEntityError, match="no function 'storm'"):
        client.messages.create(**ask, tools=TOOLS, tool_choice={"type": "tool", "name": "storm"})


def test_blocks_become_messages_of_a_chat() -> None:
    content: list[Any] = [
        {"type": "thinking", "thinking": "Hm", "signature": ""},
        {"type": "text", "text": "See"},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
    ]
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "3"}]}
    ]
    request = MessagesRequest.model_validate(
        {
            **{"model": "", "max_tokens": 3, "system": [{"type": "text", "text": "Brief"}]},
            "messages": [
                {"role": "assistant", "content": content},
                {"role": "user", "content": results},
            ],
        }
    )
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert [message.plain() for message in request.to_chat().messages] == [
        {"role": "system", "content": "Brief"},
        {
            **{"role": "assistant", "content": "See", "reasoning_content": "Hm"},
            "tool_calls": [call],
        },
        {"role": "tool", "content": "3", "tool_call_id": "a"},
    ]
