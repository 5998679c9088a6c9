"""Completions and chats of a running server: text, choices, log-probabilities, formats."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from tests.serving.conftest import Served, serving
from tests.serving.engine.test_tools import random_object
from tests.serving.server.tool_use import TOOLS, check_call

USER: list[Any] = [{"role": "user", "content": "Hello"}]


def test_streamed_chat_equals_the_whole_answer(served: Served) -> None:
    client = served.client()
    ask: dict[str, Any] = {"model": "small", "messages": USER, "temperature": 0.0}
    whole = client.chat.completions.create(**ask, max_tokens=60)
    stream = client.chat.completions.create(
        **ask, max_completion_tokens=60, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 60
    assert chunks[-1].usage.prompt_tokens == len("<user>Hello<answer>")
    assert {c.id for c in chunks} == {chunks[0].id}
    assert all(c.usage is None for c in chunks[:-1])


def test_streamed_completion_equals_the_whole_answer(served: Served) -> None:
    client = served.client()
    ask: dict[str, Any] = {"model": "small", "prompt": "Hello", "temperature": 0.0}
    whole = client.completions.create(**ask, max_tokens=50)
    chunks = list(client.completions.create(**ask, max_tokens=50, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert len(client.completions.create(**ask).choices[0].text) <= 16


def test_equal_seeds_give_equal_choices(served: Served) -> None:
    def ask(seed: int | None) -> list[str]:
        body = {"messages": USER, "max_tokens": 30, "n": 3, "seed": seed}
        status, found, _ = served.call("/v1/chat/completions", body)
        assert status == 200
        assert [c["index"] for c in found["choices"]] == [0, 1, 2]
        assert found["usage"]["completion_tokens"] == 90
        return [c["message"]["content"] for c in found["choices"]]

    first = ask(7)
    assert len(set(first)) == 3
    assert ask(7) == first
    assert ask(8) != first
    assert ask(None) != ask(None)


def test_choices_of_a_prompt_share_its_blocks(served: Served) -> None:
    prompt = "A prompt that is longer than a block of the cache, and that is not cached yet. " * 3
    before = served.metric("vllm:prefix_cache_hits_total")
    body = {"prompt": prompt, "max_tokens": 2, "n": 3}
    status, found, _ = served.call("/v1/completions", body)
    assert status == 200
    blocks = (len(prompt) - 1) // 32
    assert served.metric("vllm:prefix_cache_hits_total") - before == 2 * 32 * blocks
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert found["usage"]["prompt_tokens"] == len(prompt)
    again = served.call("/v1/completions", body)[1]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 32 * blocks


def test_prompts_are_answered_in_order(served: Served) -> None:
    def ask(prompt: Any) -> list[str]:
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "n": 2}
        return [c["text"] for c in served.call("/v1/completions", body)[1]["choices"]]

    one, two = ask("one"), ask([50, 60, 70])
    assert ask(["one", "one"]) == one + one
    assert ask([[50, 60, 70], [1]])[:2] == two


def test_text_ends_before_a_stop_string(served: Served) -> None:
    ask = {"prompt": "Hello", "max_tokens": 80, "seed": 3}
    text = served.call("/v1/completions", ask)[1]["choices"][0]["text"]
    stop = text[10:14]
    expected = text[: text.find(stop)]
    for stream in (False, True):
        with served.client() as client:
            body: dict[str, Any] = {**ask, "model": "small", "stop": ["never there", stop]}
            if stream:
                chunks = list(client.completions.create(**body, stream=True))
                found, end = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0]
            else:
                whole = client.completions.create(**body)
                found, end = whole.choices[0].text, whole.choices[0]
        assert found == expected
        assert end.finish_reason == "stop"
    served.wait(served.quiet)


def test_chat_returns_logprobs(served: Served) -> None:
    ask: dict[str, Any] = {"model": "small", "messages": USER, "max_tokens": 5, "temperature": 0.0}
    whole = served.client().chat.completions.create(**ask, logprobs=True, top_logprobs=3)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for token in logprobs.content:
        assert token.logprob == token.top_logprobs[0].logprob  # greedy
        assert token.bytes == token.top_logprobs[0].bytes
        assert len(token.top_logprobs) == 3
        assert token.logprob < 0
    content = b"".join(bytes(token.bytes or []) for token in logprobs.content)
    assert content.decode("utf-8", "replace") == whole.choices[0].message.content
    chunks = served.client().chat.completions.create(
        **ask, logprobs=True, top_logprobs=3, stream=True
    )
    streamed = [
        token
        for c in chunks
        if c.choices and c.choices[0].logprobs
        for token in c.choices[0].logprobs.content or []
    ]
    assert streamed == logprobs.content


def test_echo_with_logprobs_scores_the_prompt(served: Served) -> None:
    ask = {"prompt": "Hello you", "echo": True, "logprobs": 1, "temperature": 0}
    scored = served.call("/v1/completions", {**ask, "max_tokens": 0})[1]
    choice = scored["choices"][0]
    assert choice["text"] == "Hello you"
    assert choice["logprobs"]["tokens"] == list("Hello you")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
    assert choice["logprobs"]["text_offset"] == list(range(9))
    assert scored["usage"]["completion_tokens"] == 0
    longer = served.call("/v1/completions", {**ask, "max_tokens": 4})[1]["choices"][0]
    assert longer["text"].startswith("Hello you")
    assert longer["logprobs"]["token_logprobs"][:9] == choice["logprobs"]["token_logprobs"]
    assert len(longer["logprobs"]["tokens"]) == 13
    # A generated token has the log-probability that it has in a prompt.
    ids = served.call("/tokenize", {"prompt": "Hello you"})[1]["tokens"]
    plain = {"prompt": ids, "max_tokens": 1, "logprobs": 0, "temperature": 0}
    first = served.call("/v1/completions", plain)[1]["choices"][0]["logprobs"]
    assert first["token_logprobs"][0] == longer["logprobs"]["token_logprobs"][9]


def test_output_matches_the_response_format(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    forms: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, json.loads),
        ({"type": "regex", "regex": "(yes|no){2}"}, re.compile("(yes|no){2}").fullmatch),
        ({"type": "grammar", "grammar": 'start: "a" "b"+ "c"'}, re.compile("ab+c").fullmatch),
    ]
    for form, check in forms:
        body = {"messages": USER, "response_format": form, "max_tokens": 300, "seed": 1}
        status, found, _ = served.call("/v1/chat/completions", body)
        assert status == 200, found
        assert found["choices"][0]["finish_reason"] == "stop"
        assert check(found["choices"][0]["message"]["content"])
    wrong = {"type": "regex", "regex": "(("}
    body = {"messages": USER, "response_format": wrong, "max_tokens": 5}
    status, found, _ = served.call("/v1/chat/completions", body)
    assert status == 422, found
    assert "regex" in found["error"]["message"]
    served.wait(served.quiet)


def test_tools_are_passed_to_the_chat_template(served: Served) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = {"messages": USER, "max_tokens": 1}
    without = served.call("/v1/chat/completions", body)[1]["usage"]["prompt_tokens"]
    body = {**body, "tools": [tool], "tool_choice": "auto", "parallel_tool_calls": True}
    found = served.call("/v1/chat/completions", body)[1]["usage"]["prompt_tokens"]
    assert found == without + len(json.dumps([tool]))


def test_text_parts_and_ignored_fields_are_accepted(served: Served) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "user": "me"}
    status, found, _ = served.call("/v1/chat/completions", {**body, "metadata": {"a": "b"}})
    assert status == 200
    assert found["usage"]["prompt_tokens"] == len("<user>Hello<answer>")


def test_tool_calls_are_valid_and_streamed(served: Served) -> None:
    client = served.client()
    ask: dict[str, Any] = {"model": "small", "messages": USER, "tools": TOOLS, "temperature": 1.0}
    for seed in range(6):
        choices: list[Any] = ["required", {"type": "function", "function": {"name": "weather"}}]
        ask |= {"seed": seed, "tool_choice": choices[seed % 2]}
        whole = client.chat.completions.create(**ask).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        found = [(c.function.name, c.function.arguments) for c in whole.message.tool_calls or ()]
        assert found
        for name, arguments in found:
            check_call(name, arguments)
        calls: dict[int, list[str]] = {}
        for chunk in client.chat.completions.create(**ask, stream=True):
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.function is not None
                if call.id:
                    calls[call.index] = [call.function.name or "", ""]
                calls[call.index][1] += call.function.arguments or ""
        assert [tuple(call) for call in calls.values()] == found


def test_without_a_call_the_reply_is_content(served: Served) -> None:
    ask = {"messages": USER, "tools": TOOLS, "max_tokens": 12, "temperature": 0.0}
    plain = served.call("/v1/chat/completions", {**ask, "tool_choice": "none"})[1]
    without = {name: value for name, value in ask.items() if name != "tools"}
    assert (
        served.call("/v1/chat/completions", without)[1]["choices"][0]["message"]
        == plain["choices"][0]["message"]
    )
    auto = served.call("/v1/chat/completions", ask)[1]["choices"][0]
    assert auto["message"]["content"]
    assert auto["finish_reason"] == "length"


def test_impossible_tools_are_errors(served: Served) -> None:
    named = {"type": "function", "function": {"name": "storm"}}
    text = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    for change, message in (
        ({"tools": TOOLS, "tool_choice": named}, "no function 'storm'"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": TOOLS * 2}, "two functions have the same name"),
        ({"tools": [text]}, "the parameters of 'f' must be an object"),
        ({"tools": TOOLS, "response_format": {"type": "regex", "regex": "a"}}, "response_format"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f"]}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "tool_calls"),
    ):
        status, found, _ = served.call("/v1/chat/completions", {"messages": USER, **change})
        assert status == 422, change
        assert message in found["error"]["message"]


def test_an_agent_calls_three_tools_in_turn(served: Served) -> None:
    client = served.client()
    tools = [*TOOLS, {"type": "function", "function": {"name": "finish"}}]
    messages: list[Any] = [*USER]
    for name in ("weather", "clock", "finish"):
        choice: Any = {"type": "function", "function": {"name": name}}
        ask: dict[str, Any] = {"model": "small", "messages": messages, "tools": tools}
        reply = client.chat.completions.create(**ask, tool_choice=choice, seed=1).choices[0].message
        assert reply.tool_calls is not None
        (call,) = reply.tool_calls
        assert call.type == "function"
        assert call.function.name == name
        messages.append(reply.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"{name} done"})
    last: dict[str, Any] = {"messages": messages, "tools": tools, "tool_choice": "none"}
    answer = client.chat.completions.create(model="small", **last, max_tokens=8).choices[0]
    assert answer.message.content
    assert answer.message.tool_calls is None


@pytest.mark.slow
def test_a_thousand_required_calls_of_a_real_model_are_valid(smollm2: Path, tmp_path: Path) -> None:
    words = ["Plan a trip to Oslo", "What is 2 + 2?", "Hi", "Sort my files", "Écris un poème"]

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        schemas = {f"f{index}": random_object(rng) for index in range(rng.randrange(1, 4))}
        tools: list[Any] = [
            {"type": "function", "function": {"name": name, "parameters": schema}}
            for name, schema in schemas.items()
        ]
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": rng.choice(words)}],
            **{"tools": tools, "tool_choice": "required", "seed": seed},
            "temperature": rng.choice([0.0, 1.0]),
        }
        client, calls = made.client(timeout=3600.0), list[list[str]]()
        reason = None
        for chunk in client.chat.completions.create(model="smollm2", **body, stream=True):
            reason = chunk.choices[0].finish_reason
            for call in chunk.choices[0].delta.tool_calls or ():
                assert call.function is not None
                if call.id:
                    calls.append([call.function.name or "", ""])
                calls[call.index][1] += call.function.arguments or ""
        assert reason == "tool_calls"
        for name, arguments in calls:
            assert jsonschema_rs.is_valid(schemas[name], json.loads(arguments)), seed
        if seed % 10 == 0:
            whole = client.chat.completions.create(model="smollm2", **body).choices[0].message
            found = [[c.function.name, c.function.arguments] for c in whole.tool_calls or ()]  # pyright: ignore
            assert found == calls

    # A call may be as long as the model's context, at 32 requests per step.
    timeout = "--timeout", "3600"
    with serving(smollm2, tmp_path, *timeout) as made, ThreadPoolExecutor(32) as pool:
        assert len(list(pool.map(ask, range(1000)))) == 1000
