"""Deadlines, metrics, connections and engine failures of a response."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket
import time
from typing import Any

import pytest

from ingot.serving.engine.output import Output
from ingot.serving.server.admission import Admission, AdmissionLimits
from ingot.serving.server.completion import CompletionStream
from ingot.serving.server.keys import ANONYMOUS
from ingot.serving.server.response import EngineResponse
from ingot.serving.server.service import Service
from tests.serving.conftest import Served
from tests.serving.server.test_completion import new_completion


def test_missed_deadline_is_a_timeout_error(served: Served) -> None:
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


def test_requests_are_counted_and_logged(served: Served) -> None:
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
        assert f'vllm:{name}{{engine="0",model_name="small",version="small@' in page
    row = [r for r in served.log.read_text().splitlines() if '"generated_tokens": 11' in r][-1]
    assert json.loads(row)["finish_reason"] == "length"
    assert "Hello" not in row


def test_connection_stays_open_after_a_stream(served: Served) -> None:
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


@pytest.mark.parametrize("stream", [False, True])
def test_engine_failure_at_the_first_token_is_an_error_response(stream: bool) -> None:
    """Token and failure arrive in one iteration of the event loop: nothing was sent yet."""

    async def run() -> list[Any]:
        answer, _ = new_completion(stream=stream)
        context = dataclasses.replace(answer.context, deadline=time.monotonic() + 10)
        answer = CompletionStream(answer.writer, context)
        admission = Admission(AdmissionLimits())
        service = Service(
            model="m", tokenizer=context.tokenizer, engine=context.engine, admission=admission
        )
        ticket = admission.acquire(ANONYMOUS, requests=1, tokens=9, now=0.0)
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.sleep(60)

        response = asyncio.create_task(
            EngineResponse(answer, ticket, admission=service.admission, metrics=service.metrics)(
                {"type": "http", "path": "/v1/completions"}, receive, send
            )
        )
        await asyncio.sleep(0)
        (choice,) = answer.choices
        choice.on_output(Output(choice.id, (70,)), 1.0)
        choice.on_error(503, "the engine stopped", "wait")
        await response
        assert admission.requests == 0
        return sent

    sent = asyncio.run(run())
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"2") in sent[0]["headers"]
    assert b"the engine stopped" in sent[1]["body"]
