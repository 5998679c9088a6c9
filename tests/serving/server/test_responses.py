"""`/v1/responses` with OpenAI's own client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from ingot.serving.server.responses import ResponsesRequest
from tests.serving.conftest import Served
from tests.serving.server.tool_use import SCHEMAS, check_call

TOOLS: list[Any] = [
    {"type": "function", "name": name, "parameters": schema, "strict": True}
    for name, schema in SCHEMAS.items()
]
ASK: dict[str, Any] = {"model": "small", "temperature": 0, "input": "Hello"}


def streamed(served: Served, **ask: Any) -> tuple[list[Any], Any]:
    """Return the events of a stream, and the response of the last one."""
    with served.client().responses.stream(**ask) as stream:
        events = list(stream)
        return events, events[-1].response  # pyright: ignore


def test_a_stream_joins_to_the_whole_response(served: Served) -> None:
    ask = {**ASK, "instructions": "Be brief.", "max_output_tokens": 20}
    whole = served.client().responses.create(**ask)
    events, joined = streamed(served, **ask)
    assert whole.output_text
    assert joined.output_text == whole.output_text
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert whole.status == joined.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 20


def test_tools_are_called_and_their_results_sent_back(served: Served) -> None:
    ask: dict[str, Any] = {**ASK, "tools": TOOLS, "tool_choice": "required"}
    whole = served.client().responses.create(**ask, parallel_tool_calls=False)
    events, joined = streamed(served, **ask, parallel_tool_calls=False)
    for response in (whole, joined):
        (call,) = response.output
        assert call.type == "function_call"
        check_call(call.name, call.arguments)
        assert response.status == "completed"
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == joined.output[0].arguments
    (call,) = whole.output
    assert call.type == "function_call"
    items: list[Any] = [
        {"role": "user", "content": "Hello"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "12 degrees"},
    ]
    ask = {**ASK, "input": items, "tools": TOOLS, "tool_choice": "none"}
    answer = served.client().responses.create(**ask, max_output_tokens=4)
    assert answer.output_text


def test_text_may_have_a_schema(served: Served) -> None:
    format = {"type": "json_schema", "name": "w", "schema": SCHEMAS["weather"], "strict": True}
    answer = served.client().responses.create(**ASK, text={"format": format})  # pyright: ignore
    check_call("weather", answer.output_text)


def test_what_is_not_supported_is_an_error(served: Served) -> None:
    with pytest.raises(openai.UnprocessableEntityError, match="previous_response_id"):
        served.client().responses.create(**ASK, previous_response_id="resp_1")


def test_items_become_messages_of_a_chat() -> None:
    request = ResponsesRequest.model_validate(
        {
            "instructions": "Brief",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "id": "r", "summary": []},
                {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
                {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "3"},
            ],
            "tools": TOOLS,
            "tool_choice": {"type": "function", "name": "clock"},
        }
    )
    chat = request.to_chat()
    roles = [message.role for message in chat.messages]
    assert roles == ["system", "user", "assistant", "tool"]
    calls = chat.messages[2].plain()["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["f", "g"]
    assert chat.functions() == {"clock": SCHEMAS["clock"]}
