"""The client against a real server, and against one that fails in every way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import ConfigError, DataError, IngotError
from ingot.evaluation import client
from ingot.evaluation.client import HttpModel, ServerError, base_url
from ingot.evaluation.model import SampleRequest
from ingot.evaluation.task import AnswerRow, EvalTask, PerplexityRow

ANSWER = {"choices": [{"text": " Paris", "finish_reason": "stop"}], "usage": {}}
MODELS = {"data": [{"id": "one"}]}


class Responses:
    """What a server answers, in order; the last response is repeated."""

    def __init__(self, *responses: tuple[int, Any, dict[str, str]]) -> None:
        self.responses = list(responses)
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.running = self.most_running = 0
        self.seconds = 0.0
        self.lock = threading.Lock()

    def next(self) -> tuple[int, Any, dict[str, str]]:
        with self.lock:
            return self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]


@contextmanager
def answering(responses: Responses) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, MODELS, {})

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            responses.requests.append((self.path, headers, json.loads(content)))
            with responses.lock:
                responses.running += 1
                responses.most_running = max(responses.most_running, responses.running)
            time.sleep(responses.seconds)
            with responses.lock:
                responses.running -= 1
            self.reply(*responses.next())

        def reply(self, status: int, body: Any, headers: dict[str, str]) -> None:
            if status == 0:  # break the connection
                self.connection.close()
                return
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"content-length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_pause", lambda attempt, after: 0.001)


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


@pytest.mark.parametrize("status", [429, 502, 503, 504, 0])
def test_an_overloaded_server_is_asked_again(task: EvalTask, status: int) -> None:
    failure = (status, {"error": {"message": "busy"}}, {"retry-after": "1"})
    responses = Responses(failure, failure, (200, ANSWER, {}))
    with answering(responses) as url:
        ((_, output),) = HttpModel(task=task, url=url).generate(requests())
    assert output.text == " Paris"
    assert len(responses.requests) == 3


def test_a_server_that_stays_overloaded_is_an_error(task: EvalTask) -> None:
    responses = Responses((503, b"down", {}))
    with answering(responses) as url:
        model = HttpModel(task=task, url=url)
        with pytest.raises(ServerError, match="503: down") as error:
            list(model.generate(requests()))
    assert len(responses.requests) == client.MAX_ATTEMPTS
    assert "continues" in error.value.hint


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


def test_a_long_response_is_not_read(task: EvalTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_BODY", 100)
    with answering(Responses((200, b" " * 101, {}))) as url:
        model = HttpModel(task=task, url=url)
        with pytest.raises(ServerError, match="more than 100 bytes"):
            list(model.generate(requests()))


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


def test_addresses() -> None:
    assert base_url("https://example.com:1/v1/") == "https://example.com:1/v1"
    for url in ("ftp://x", "http://", "http://host?key=1"):
        with pytest.raises(ConfigError, match="not the URL"):
            base_url(url)
    with pytest.raises(ConfigError, match="password"):
        base_url("http://user:secret@host")


def test_models_of_the_server(task: EvalTask, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(Responses((200, ANSWER, {}))) as url:
        assert HttpModel(task=task, url=url, model_name="one").model_name == "one"
        with pytest.raises(ServerError, match="lacks that model: one"):
            HttpModel(task=task, url=url, model_name="two")
        monkeypatch.setitem(MODELS, "data", [{"id": "one"}, {"id": "two"}])
        with pytest.raises(ServerError, match="several models: one, two"):
            HttpModel(task=task, url=url)
        with pytest.raises(ConfigError, match="concurrency"):
            HttpModel(task=task, url=url, concurrency=0)
    with pytest.raises(ServerError, match="refused") as error:
        HttpModel(task=task, url=url)
    assert "running" in error.value.hint


def test_choices_after_messages_need_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "task.jsonl"
    path.write_text('{"prompt": "a", "choices": ["b", "c"], "answer": 0}\n')
    task = EvalTask.read(path, {"chat": True})
    with answering(Responses((200, ANSWER, {}))) as url:
        model = HttpModel(task=task, url=url)
        with pytest.raises(DataError, match="line 1: servers score choices after a text only"):
            model.check(task.rows())
