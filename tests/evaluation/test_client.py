"""Evaluation on a server: requests, errors that name a row, and concurrency."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import ConfigError, DataError, IngotError
from ingot.evaluation.client import HttpModel
from ingot.evaluation.model import SampleRequest
from ingot.evaluation.task import AnswerRow, EvalTask, PerplexityRow
from ingot.interop import openai_client
from ingot.interop.openai_client import ServerError
from tests.openai_server import Responses, answering

ANSWER = {"choices": [{"text": " Paris", "finish_reason": "stop"}], "usage": {}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "_pause", lambda attempt, after: 0.001)


@pytest.fixture
def task(tmp_path: Path) -> EvalTask:
    path = tmp_path / "task.jsonl"
    path.write_text('{"prompt": "The capital of France is", "answer": "Paris"}\n')
    return EvalTask.read(path, {"max_tokens": 3, "stop": ["."]})


def requests(count: int = 1) -> Iterator[SampleRequest]:
    row = AnswerRow(1, "The capital of France is", ("Paris",))
    return (SampleRequest(row, number, seed=number) for number in range(count))


def test_requests_have_the_settings_and_the_key(task: EvalTask) -> None:
    responses = Responses((200, ANSWER, {}))
    with answering(responses) as url:
        model = HttpModel(task=task, url=url, key="secret")
        assert model.describe() == {"url": f"{url}/v1", "name": "one"}
        ((_, output),) = model.generate(requests())
    assert (output.text, output.finish_reason, output.num_tokens) == (" Paris", "stop", 0)
    ((path, headers, body),) = responses.requests
    assert (path, headers["authorization"]) == ("/v1/completions", "Bearer secret")
    assert body == {
        "model": "one",
        "prompt": "The capital of France is",
        "max_tokens": 3,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
        "stop": ["."],
    }
    assert "secret" not in repr(model)


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ((400, {"error": {"message": "too long"}}, {}), "line 1: the server answers 400: too long"),
        ((422, b"<html>", {}), "line 1: the server answers 422: <html>"),
        ((302, b"", {"location": "http://127.0.0.1:9/v1/completions"}), "answers 302"),
        ((200, b"<html>", {}), "not in OpenAI's format"),
        ((200, {"choices": []}, {}), "not in OpenAI's format"),
    ],
)
def test_a_response_that_another_attempt_would_not_change(
    task: EvalTask, response: Any, message: str
) -> None:
    responses = Responses(response)
    with answering(responses) as url:
        model = HttpModel(task=task, url=url, key="secret")
        with pytest.raises(IngotError, match=message):
            list(model.generate(requests()))
    assert len(responses.requests) == 1


def test_a_server_without_echo_is_named(task: EvalTask) -> None:
    with answering(Responses((200, ANSWER, {}))) as url:
        model = HttpModel(task=task, url=url)
        with pytest.raises(ServerError, match="no log-probabilities of the prompt"):
            list(model.score_texts(iter([PerplexityRow(1, "abc")])))


def test_requests_are_concurrent_within_the_bound_and_read_lazily(task: EvalTask) -> None:
    responses = Responses((200, ANSWER, {}))
    responses.seconds = 0.02
    taken: list[int] = []

    def counted() -> Iterator[SampleRequest]:
        for request in requests(40):
            taken.append(request.sample)
            yield request

    with answering(responses) as url:
        model = HttpModel(task=task, url=url, concurrency=4)
        stream = model.generate(counted())
        next(stream)
        assert len(taken) <= 5
        assert sorted([0, *(1 for _ in stream)]) == [0] + [1] * 39
    assert responses.most_running == 4


def test_an_interrupted_stream_does_not_wait(task: EvalTask) -> None:
    responses = Responses((200, ANSWER, {}))
    with answering(responses) as url:
        model = HttpModel(task=task, url=url, concurrency=2)
        stream = model.generate(requests(3))
        next(stream)
        responses.seconds, begin = 1.0, time.monotonic()
        stream.close()  # type: ignore
        assert time.monotonic() - begin < 0.5


def test_choices_after_messages_need_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text('{"prompt": "a", "choices": ["b", "c"], "answer": 0}\n')
    task = EvalTask.read(path, {"chat": True})
    with answering(Responses((200, ANSWER, {}))) as url:
        model = HttpModel(task=task, url=url)
        with pytest.raises(DataError, match="line 1: servers score choices after a text only"):
            model.check(task.rows())


def test_concurrency_is_bounded(task: EvalTask) -> None:
    with pytest.raises(ConfigError, match="concurrency"):
        HttpModel(task=task, url="http://127.0.0.1:9", concurrency=0)
