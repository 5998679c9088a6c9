"""The API as clients meet it: a real server, OpenAI's client, and requests that are wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from ingot.serving.engine.output import Output
from ingot.serving.server.admission import Admission, AdmissionLimits
from ingot.serving.server.completion import CompletionStream
from ingot.serving.server.guard import MAX_BODY
from ingot.serving.server.keys import ANONYMOUS, format_line
from ingot.serving.server.response import EngineResponse
from ingot.serving.server.service import Service
from tests.serving.conftest import Served, serving
from tests.serving.server.test_completion import made

USER: list[Any] = [{"role": "user", "content": "Hello"}]


def test_a_stream_is_the_answer_in_pieces(served: Served) -> None:
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


def test_completions_stream_the_same_text(served: Served) -> None:
    client = served.client()
    ask: dict[str, Any] = {"model": "small", "prompt": "Hello", "temperature": 0.0}
    whole = client.completions.create(**ask, max_tokens=50)
    chunks = list(client.completions.create(**ask, max_tokens=50, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert len(client.completions.create(**ask).choices[0].text) <= 16


def test_a_seed_gives_the_same_choices_and_choices_differ(served: Served) -> None:
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


def test_the_choices_of_a_prompt_share_its_blocks(served: Served) -> None:
    prompt = "A prompt that is longer than a block of the cache, and that nobody has sent. " * 3
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


def test_several_prompts_are_answered_in_their_order(served: Served) -> None:
    def ask(prompt: Any) -> list[str]:
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "n": 2}
        return [c["text"] for c in served.call("/v1/completions", body)[1]["choices"]]

    one, two = ask("one"), ask([50, 60, 70])
    assert ask(["one", "one"]) == one + one
    assert ask([[50, 60, 70], [1]])[:2] == two


def test_a_stop_string_ends_the_text_before_it(served: Served) -> None:
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


def test_logprobs_of_a_chat(served: Served) -> None:
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
    # What is generated has the log-probability that it has as a prompt.
    ids = served.call("/tokenize", {"prompt": "Hello you"})[1]["tokens"]
    plain = {"prompt": ids, "max_tokens": 1, "logprobs": 0, "temperature": 0}
    first = served.call("/v1/completions", plain)[1]["choices"][0]["logprobs"]
    assert first["token_logprobs"][0] == longer["logprobs"]["token_logprobs"][9]


def test_an_answer_keeps_its_format(served: Served) -> None:
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


def test_tools_reach_the_template(served: Served) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = {"messages": USER, "max_tokens": 1}
    without = served.call("/v1/chat/completions", body)[1]["usage"]["prompt_tokens"]
    body = {**body, "tools": [tool], "tool_choice": "auto", "parallel_tool_calls": True}
    found = served.call("/v1/chat/completions", body)[1]["usage"]["prompt_tokens"]
    assert found == without + len(json.dumps([tool]))


def test_parts_of_text_and_fields_that_change_nothing_are_taken(served: Served) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1, "user": "me"}
    status, found, _ = served.call("/v1/chat/completions", {**body, "metadata": {"a": "b"}})
    assert status == 200
    assert found["usage"]["prompt_tokens"] == len("<user>Hello<answer>")


def test_what_there_is(served: Served) -> None:
    assert [model.id for model in served.client().models.list()] == ["small"]
    assert served.client().models.retrieve("small").id == "small"
    assert served.call("/v1/models/other")[0] == 404
    assert served.call("/healthz")[:2] == (200, {"status": "ok"})
    assert served.call("/readyz")[:2] == (200, {"status": "ready"})
    assert served.call("/nothing")[0] == 404
    assert served.call("/metrics")[0] == 200
    status, found, _ = served.call("/tokenize", {"messages": USER})
    assert status == 200
    assert found["count"] == len(found["tokens"]) == len("<user>Hello<answer>")
    assert found["max_model_len"] == 4096


def test_control_is_not_on_the_main_listener(served: Served) -> None:
    for path in ("/metrics", "/drain"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(served.url + path)


def test_embeddings_are_refused_with_the_reason(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support embeddings"):
        served.client().embeddings.create(model="small", input="Hello")


WRONG = [
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


@pytest.mark.parametrize(("status", "body", "message"), WRONG)
def test_what_is_wrong_is_refused_with_its_place(
    served: Served, status: int, body: Any, message: str | None
) -> None:
    found, answer, _ = served.call("/v1/completions", body)
    if message is None:  # lone surrogates: no crash, whatever is said of them
        assert found in (200, 404, 422), answer
        return
    assert found == status, answer
    assert message in answer["error"]["message"]
    assert len(answer["error"]["message"]) < 1200


def test_a_chat_that_is_wrong(served: Served) -> None:
    for body, message in (
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content"),
        ({"messages": USER, "top_logprobs": 2}, "needs logprobs"),
        ({"messages": USER, "chat_template_kwargs": {"messages": []}}, "may not set"),
        ({"messages": USER, "tool_choice": "required"}, "tool_choice"),
    ):
        status, answer, _ = served.call("/v1/chat/completions", body)
        assert status == 422, answer
        assert message in answer["error"]["message"]


def test_bodies_are_bounded(served: Served) -> None:
    large = b'{"prompt": "' + b"a" * MAX_BODY + b'"}'
    assert served.call("/v1/completions", large)[0] == 413
    # Not by its word alone: chunked, without a length.
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"transfer-encoding: chunked\r\n\r\n")
        try:
            for _ in range(MAX_BODY // 65536 + 4):
                connection.sendall(b"10000\r\n" + b"a" * 65536 + b"\r\n")
            connection.sendall(b"0\r\n\r\n")
        except ConnectionError:
            pass
        else:
            assert connection.recv(100).startswith(b"HTTP/1.1 413")
    assert served.call("/v1/completions", b"prompt=a", **{"content-type": "text/plain"})[0] == 415


def test_a_deadline_is_kept(served: Served) -> None:
    body = {"prompt": "Hello", "max_tokens": 4000, "timeout": 0.2}
    start = time.monotonic()
    status, answer, _ = served.call("/v1/completions", body)
    assert status == 504, answer
    assert time.monotonic() - start < 2
    with served.connect({**body, "stream": True}) as connection:
        content = b""
        while b"[DONE]" not in content and (data := connection.recv(65536)):
            content += data
            if b'"error"' in content:
                break
    assert content.startswith(b"HTTP/1.1 200")
    assert b'"timeout_error"' in content
    served.wait(served.quiet)


def test_requests_leave_their_figures(served: Served) -> None:
    before = served.metric("vllm:time_to_first_token_seconds_count")
    between = served.metric("vllm:inter_token_latency_seconds_count")
    served.tokens(count=11)
    assert served.metric("vllm:time_to_first_token_seconds_count") == before + 1
    assert served.metric("vllm:inter_token_latency_seconds_count") == between + 10
    assert served.metric("vllm:request_success_total", finished_reason="length") > 0
    assert served.metric("ingot:http_responses_total", status="200") > 0
    page = served.call("/metrics")[1]["text"]
    assert 'vllm:cache_config_info{block_size="32"' in page
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert f'vllm:{name}{{engine="0",model_name="small"}}' in page
    row = [r for r in served.log.read_text().splitlines() if '"generated_tokens": 11' in r][-1]
    assert json.loads(row)["finish_reason"] == "length"
    assert "Hello" not in row


def test_connections_are_kept_alive_through_streams(served: Served) -> None:
    body = {"prompt": "Hello", "max_tokens": 20, "stream": True}
    content = json.dumps(body).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.settimeout(30)
        for _ in range(3):
            connection.sendall(head + b"content-length: %d\r\n\r\n" % len(content) + content)
            found = b""
            while not found.endswith(b"0\r\n\r\n"):
                found += connection.recv(65536)
            assert found.count(b"[DONE]") == 1
            assert b"transfer-encoding: chunked" in found


def test_keys_say_who_may_and_keep_caches_apart(directory: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(
        f"{format_line('alice', 'a')}\n{format_line('bob', 'b')}\n"
        f"{format_line('carol', 'c')} requests=2\n"
    )
    with serving(directory, tmp_path, "--api-key-file", str(keys)) as served:
        prompt = "A prompt of more than one block, which is thirty-two tokens, so it is cached."
        body = {"prompt": prompt, "max_tokens": 1}

        def cached(key: str) -> int:
            status, found, _ = served.call("/v1/completions", body, key)
            assert status == 200, found
            return found["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("a") == 0
        assert cached("a") > 0
        assert cached("b") == 0, "nobody learns what another has sent"
        for key in (None, "wrong", "a" * 5000, "\xff"):
            status, answer, headers = served.call("/v1/completions", body, key)
            assert status == 401
            assert headers["www-authenticate"] == "Bearer"
            assert answer["error"]["code"] == "invalid_api_key"
        assert served.call("/v1/models")[0] == 401
        assert served.call("/healthz")[0] == 200
        assert served.client("a").models.list().data[0].id == "small"
        assert cached("c") == 0
        assert cached("c") > 0
        status, answer, headers = served.call("/v1/completions", body, "c")
        assert status == 429
        assert "2 requests per minute" in answer["error"]["message"]
        assert 20 <= int(headers["retry-after"]) <= 30
        assert cached("a") > 0, "another's bound is nobody else's"
        assert "Bearer" not in served.log.read_text()


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_with_the_first_token_is_an_error(stream: bool) -> None:
    """The token and the death in one turn of the loop: nothing was sent yet."""

    async def run() -> list[Any]:
        answer, _ = made(stream=stream)
        place = dataclasses.replace(answer.context, deadline=time.monotonic() + 10)
        answer = CompletionStream(answer.job, place)
        admission = Admission(AdmissionLimits())
        service = Service(
            model="m", tokenizer=place.tokenizer, engine=place.engine, admission=admission
        )
        ticket = admission.acquire(ANONYMOUS, requests=1, tokens=9, now=0.0)
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.sleep(60)

        replying = asyncio.create_task(
            EngineResponse(answer, ticket, admission=service.admission, metrics=service.metrics)(
                {"type": "http"}, receive, send
            )
        )
        await asyncio.sleep(0)
        (choice,) = answer.choices
        choice.on_output(Output(choice.id, (70,)), 1.0)
        choice.on_error(503, "the engine has died", "wait")
        await replying
        assert admission.requests == 0
        return sent

    sent = asyncio.run(run())
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"2") in sent[0]["headers"]
    assert b"the engine has died" in sent[1]["body"]
