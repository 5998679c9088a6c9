"""An answer in the making, with a front that is a list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ingot.serving.engine.detokenizer import Pieces
from ingot.serving.engine.output import Logprob, Output
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.server.completion import Answer, Failure, Place
from ingot.serving.server.metrics import Metrics
from ingot.serving.server.openai import Job
from tests.serving.engine.test_detokenizer import TOKENIZER


class Asked:
    """What the front was asked and told."""

    def __init__(self) -> None:
        self.ids = 0
        self.requests: list[Request] = []
        self.ends: list[tuple[int, FinishReason]] = []

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    def add(self, request: Request, sink: Any) -> None:
        self.requests.append(request)

    def end(self, id: int, reason: FinishReason) -> None:
        self.ends.append((id, reason))


def made(**changes: Any) -> tuple[Answer, Asked]:
    front = Asked()
    fields = {
        "chat": False,
        "model": "m",
        "prompts": [(1, 2)],
        "texts": [],
        "n": 1,
        "max_tokens": 9,
        "options": SamplingParams(stop_token_ids=(0,)),
        **changes,
    }
    place = Place(
        front=front,  # pyright: ignore
        tokenizer=TOKENIZER,
        pieces=Pieces(TOKENIZER),
        metrics=Metrics(),
        cache_salt=b"s",
        priority=3,
        deadline=9.0,
    )
    return Answer(Job(**fields), place), front


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
        answer, front = made(n=3, prompts=[(1, 2), (3,)], options=SamplingParams(seed=7))
        answer.ask()
        assert [r.prompt for r in front.requests] == [(1, 2), (3,)]
        first = answer.choices[0]
        first.take(Output(first.id, num_cached_tokens=32), 1.0)
        assert len(front.requests) == 2
        first.take(Output(first.id, ids("a")), 1.0)
        first.take(Output(first.id, ids("b")), 1.0)
        assert [r.prompt for r in front.requests[2:]] == [(1, 2), (1, 2)]
        assert [r.sampling_params.seed for r in front.requests] == [7, 10, 8, 9]
        assert all((r.cache_salt, r.priority, r.deadline) == (b"s", 3, 9.0) for r in front.requests)
        assert answer.cached == 32
        answer.cancel()
        assert len(front.ends) == 6

    run(test)


def test_a_stream_is_one_write_a_step_and_ends_once() -> None:
    async def test() -> None:
        answer, _ = made(stream=True, usage=True)
        answer.ask()
        written: list[bytes] = []
        (choice,) = answer.choices
        choice.take(Output(choice.id, ids("é")[:1]), 1.0)
        assert answer.began.done()
        answer.stream_to(written.append)
        answer.flush()
        assert written == [], "half a character is nothing to say"
        choice.take(Output(choice.id, ids("é")[1:] + ids('"\n')), 1.5)
        answer.flush()
        choice.take(Output(choice.id, (*ids("!"), 0), finish_reason=FinishReason.STOP), 2.0)
        answer.flush()
        answer.flush()
        assert len(written) == 2
        found = events(b"".join(written))
        assert [c["text"] for e in found[:-2] for c in e["choices"]] == ['é"\n', "!", ""]
        assert found[-3]["choices"][0]["finish_reason"] == "stop"
        assert found[-2]["usage"]["completion_tokens"] == 6
        assert found[-1] == "data: [DONE]"
        assert answer.done.done()
        assert answer.place.metrics.between.buckets()[-1] == ("+Inf", 2)

    run(test)


def test_a_stop_string_ends_the_engines_request_too() -> None:
    async def test() -> None:
        answer, front = made(stops=("bc",))
        answer.ask()
        (choice,) = answer.choices
        choice.take(Output(choice.id, ids("ab")), 1.0)
        assert not answer.done.done()
        choice.take(Output(choice.id, ids("cd")), 1.0)
        assert front.ends == [(choice.id, FinishReason.STOP)]
        assert json.loads(answer.body())["choices"][0]["text"] == "a"
        answer.cancel()
        assert len(front.ends) == 1

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
        answer, front = made(n=2, stream=stream)
        answer.ask()
        first, second = answer.choices
        first.take(Output(first.id, ids("a")), 1.0)
        first.take(output, 1.0)
        second.take(output, 1.0)
        assert answer.failure is not None
        assert answer.failure.status == status
        assert "secret" not in answer.failure.what
        assert answer.done.done()
        assert b"".join(answer.out).count(b'"error"') == stream
        assert (second.id, FinishReason.CANCELLED) in front.ends

    run(test)


def test_logprobs_of_half_characters_have_their_bytes() -> None:
    async def test() -> None:
        answer, _ = made(options=SamplingParams(logprobs=1, stop_token_ids=(0,)))
        answer.ask()
        (choice,) = answer.choices
        halves = ids("é")
        logprobs = tuple(Logprob(t, -0.5, ((t, -0.5),)) for t in halves)
        choice.take(Output(choice.id, halves, logprobs, finish_reason=FinishReason.LENGTH), 1.0)
        found = json.loads(answer.body())["choices"][0]
        assert found["text"] == "é"
        assert found["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
        assert found["finish_reason"] == "length"

    run(test)


def test_a_failure_is_json_whatever_it_repeats() -> None:
    body = json.loads(Failure(404, "no model '\ud800\"'", "ask").body())
    assert body["error"]["type"] == "not_found_error"
