"""Completions in progress, with a fake engine client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ingot.serving.engine.detokenizer import TokenTexts
from ingot.serving.engine.output import Logprob, Output
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.server.completion import ApiError, CompletionStream, RequestContext
from ingot.serving.server.metrics import Metrics
from ingot.serving.server.openai import GenerationJob
from ingot.serving.server.writer import CompletionWriter
from tests.serving.engine.test_detokenizer import TOKENIZER


class FakeEngine:
    """An engine client that records requests and aborts."""

    def __init__(self) -> None:
        self.ids = 0
        self.requests: list[Request] = []
        self.aborts: list[tuple[int, FinishReason]] = []

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    def add_request(self, request: Request, handler: Any, session: str) -> None:
        self.requests.append(request)

    def abort(self, id: int, reason: FinishReason) -> None:
        self.aborts.append((id, reason))


def new_completion(**changes: Any) -> tuple[CompletionStream, FakeEngine]:
    engine = FakeEngine()
    fields = {
        "model": "m",
        "prompts": [(1, 2)],
        "echo": [],
        "n": 1,
        "max_tokens": 9,
        "sampling_params": SamplingParams(stop_token_ids=(0,)),
        **changes,
    }
    context = RequestContext(
        engine=engine,  # pyright: ignore
        tokenizer=TOKENIZER,
        metrics=Metrics(),
        cache_salt=b"s",
        priority=3,
        deadline=9.0,
    )
    writer = CompletionWriter(GenerationJob(**fields), TokenTexts(TOKENIZER))
    return CompletionStream(writer, context), engine


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    asyncio.run(main())


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


def events(data: bytes) -> list[Any]:
    rows = [row for row in data.decode().split("\n\n") if row]
    return [
        row if row == "data: [DONE]" else json.loads(row.removeprefix("data: ")) for row in rows
    ]


def test_other_choices_are_asked_for_when_the_first_has_a_token() -> None:
    async def test() -> None:
        completion, engine = new_completion(
            n=3, prompts=[(1, 2), (3,)], sampling_params=SamplingParams(seed=7)
        )
        completion.submit()
        assert [r.prompt for r in engine.requests] == [(1, 2), (3,)]
        first = completion.choices[0]
        first.on_output(Output(first.id, num_cached_tokens=32), 1.0)
        assert len(engine.requests) == 2
        first.on_output(Output(first.id, ids("a")), 1.0)
        first.on_output(Output(first.id, ids("b")), 1.0)
        assert [r.prompt for r in engine.requests[2:]] == [(1, 2), (1, 2)]
        assert [r.sampling_params.seed for r in engine.requests] == [7, 10, 8, 9]
        assert all(
            (r.cache_salt, r.priority, r.deadline) == (b"s", 3, 9.0) for r in engine.requests
        )
        assert completion.num_cached_tokens == 32
        completion.cancel()
        assert len(engine.aborts) == 6

    run(test)


def test_a_stream_is_one_write_a_step_and_ends_once() -> None:
    async def test() -> None:
        completion, _ = new_completion(stream=True, include_usage=True)
        completion.submit()
        written: list[bytes] = []
        (choice,) = completion.choices
        choice.on_output(Output(choice.id, ids("é")[:1]), 1.0)
        assert completion.began.done()
        completion.stream_to(written.append)
        completion.flush()
        assert written == [], "half a character is nothing to say"
        choice.on_output(Output(choice.id, ids("é")[1:] + ids('"\n')), 1.5)
        completion.flush()
        choice.on_output(Output(choice.id, (*ids("!"), 0), finish_reason=FinishReason.STOP), 2.0)
        completion.flush()
        completion.flush()
        assert len(written) == 2
        found = events(b"".join(written))
        assert [c["text"] for e in found[:-2] for c in e["choices"]] == ['é"\n', "!", ""]
        assert found[-3]["choices"][0]["finish_reason"] == "stop"
        assert found[-2]["usage"]["completion_tokens"] == 6
        assert found[-1] == "data: [DONE]"
        assert completion.done.done()
        assert completion.context.metrics.itl.buckets()[-1] == ("+Inf", 2)

    run(test)


def test_a_stop_string_ends_the_engines_request_too() -> None:
    async def test() -> None:
        completion, engine = new_completion(stop=("bc",))
        completion.submit()
        (choice,) = completion.choices
        choice.on_output(Output(choice.id, ids("ab")), 1.0)
        assert not completion.done.done()
        choice.on_output(Output(choice.id, ids("cd")), 1.0)
        assert engine.aborts == [(choice.id, FinishReason.STOP)]
        assert json.loads(completion.body())["choices"][0]["text"] == "a"
        completion.cancel()
        assert len(engine.aborts) == 1

    run(test)


@pytest.mark.parametrize(
    ("output", "status"),
    [
        (Output(1, finish_reason=FinishReason.DEADLINE), 504),
        (Output(1, finish_reason=FinishReason.REJECTED), 429),
        (Output(1, finish_reason=FinishReason.REJECTED, error="no grammar"), 422),
        (Output(1, finish_reason=FinishReason.CANCELLED), 503),
        (Output(1, finish_reason=FinishReason.FAILED, error="secret"), 500),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_whatever_goes_wrong_is_one_clean_failure(
    output: Output, status: int, stream: bool
) -> None:
    async def test() -> None:
        completion, engine = new_completion(n=2, stream=stream)
        completion.submit()
        first, second = completion.choices
        first.on_output(Output(first.id, ids("a")), 1.0)
        first.on_output(output, 1.0)
        second.on_output(output, 1.0)
        assert completion.error is not None
        assert completion.error.status == status
        assert "secret" not in completion.error.message
        assert completion.done.done()
        assert b"".join(completion.out).count(b'"error":{') == stream
        assert (second.id, FinishReason.CANCELLED) in engine.aborts

    run(test)


def test_logprobs_of_half_characters_have_their_bytes() -> None:
    async def test() -> None:
        completion, _ = new_completion(
            sampling_params=SamplingParams(logprobs=1, stop_token_ids=(0,))
        )
        completion.submit()
        (choice,) = completion.choices
        halves = ids("é")
        logprobs = tuple(Logprob(t, -0.5, ((t, -0.5),)) for t in halves)
        choice.on_output(
            Output(choice.id, halves, logprobs, finish_reason=FinishReason.LENGTH), 1.0
        )
        found = json.loads(completion.body())["choices"][0]
        assert found["text"] == "é"
        assert found["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
        assert found["finish_reason"] == "length"

    run(test)


def test_a_failure_is_json_whatever_it_repeats() -> None:
    body = json.loads(ApiError(404, "no model '\ud800\"'", "ask").body())
    assert body["error"]["type"] == "not_found_error"
