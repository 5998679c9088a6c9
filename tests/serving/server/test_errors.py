"""Invalid requests, their status and their message."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.conftest import Served

USER: list[Any] = [{"role": "user", "content": "Hello"}]


INVALID = [
    (400, {"prompt": "a" * 4096}, "context is 4,096"),
    (400, {"prompt": "a", "max_tokens": 4096}, "plus 4,096 requested"),
    (400, b"{", "not valid JSON"),
    (400, b'{"prompt": "a' + b"[" * 100_000, "not valid JSON"),
    (404, {"prompt": "a", "model": "gpt-9"}, "model 'gpt-9' not found"),
    (422, {}, "prompt"),
    (422, {"prompt": ""}, "empty"),
    (422, {"prompt": [256]}, "token ids must be below 256"),
    (422, {"prompt": "a", "logit_bias": {"256": 1}}, "below the vocabulary size"),
    (422, {"prompt": "a", "logit_bais": {}}, "logit_bais"),
    (422, {"prompt": "a", "logit_bias": {"x": 1}}, "keys must be token ids"),
    (422, {"prompt": "a", "logit_bias": {"1": 101}}, "100"),
    (422, {"prompt": "a", "temperature": -0.1}, "temperature"),
    (422, {"prompt": "a", "temperature": "1"}, "temperature"),
    (422, b'{"prompt": "a", "temperature": NaN}', "temperature"),
    (422, b'{"prompt": "a", "temperature": 1e999}', "temperature"),
    (422, {"prompt": "a", "max_tokens": 10**12}, "max_tokens"),
    (422, {"prompt": "a", "max_tokens": 0}, "echo"),
    (422, {"prompt": "a", "n": 129}, "n"),
    (422, {"prompt": ["a"] * 100, "n": 2}, "128 choices"),
    (422, {"prompt": "a", "stop": ""}, "stop"),
    (422, {"prompt": "a", "stop": ["x"] * 17}, "stop"),
    (422, {"prompt": "a", "best_of": 3}, "best_of"),
    (422, {"prompt": "a", "seed": 2**63}, "seed"),
    (422, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (422, {"prompt": "a", "timeout": 0}, "timeout"),
    (422, {"prompt": "a", "response_format": {"type": "json_schema"}}, "needs json_schema"),
    (422, {"prompt": "a\ud800", "max_tokens": 1, "stop": "\ud800"}, None),
    (422, {"prompt": "a", "response_format": {"type": "regex", "regex": "\ud800"}}, None),
    (404, {"prompt": "a", "model": "\ud800"}, None),
]


@pytest.mark.parametrize(("status", "body", "message"), INVALID)
def test_invalid_completion_is_rejected_with_the_field(
    served: Served, status: int, body: Any, message: str | None
) -> None:
    found, answer, _ = served.call("/v1/completions", body)
    if message is None:  # lone surrogates: any of these, but no crash
        assert found in (200, 404, 422), answer
        return
    assert found == status, answer
    assert message in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 1200


def test_invalid_chat_is_rejected_with_the_field(served: Served) -> None:
    for body, message in (
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type: Input should be 'text'",
        ),
        ({"messages": USER, "top_logprobs": 2}, "needs logprobs"),
        ({"messages": USER, "chat_template_kwargs": {"messages": []}}, "may not set"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ):
        status, answer, _ = served.call("/v1/chat/completions", body)
        assert status == 422, answer
        assert message in answer["error"]["message"]


def test_the_best_alternative_of_a_union_is_reported(served: Served) -> None:
    image = {"type": "input_image", "image_url": "https://x"}
    for item, message in (
        ({"role": "user", "content": [image]}, "input.0.content.0.type: Input should be 'input_t"),
        ({"role": "usr", "content": "Hi"}, "input.0.role: Input should be 'user'"),
        ({"type": "function_call_output", "output": "3"}, "input.0.call_id: Field required"),
    ):
        status, answer, _ = served.call("/v1/responses", {"model": "", "input": [item]})
        assert status == 422, answer
        assert answer["error"]["message"].startswith(message)
        assert answer["error"]["param"] == "input"
