"""A server is not trusted: its answer is checked before a number of it is used."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from ingot.core.errors import IngotError
from ingot.interop import completions
from ingot.interop.completions import is_url, prompt_logprobs

MODELS = {"data": [{"id": "small"}]}
GOOD: dict[str, Any] = {
    "token_logprobs": [None, -0.5, -1.5, -9.0],
    "top_logprobs": [None, {"a": -0.5, "b": -1.0}, {"c": -0.1}, {"d": -9.0}],
}


def answer(**changes: Any) -> dict[str, Any]:
    return {"choices": [{"text": "", "logprobs": {**GOOD, **changes}}]}


@contextmanager
def server(*answers: tuple[int, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answer one completion after another; yield the address and the bodies received."""
    left, bodies = list(answers), list[dict[str, Any]]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, MODELS)

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            body = json.loads(self.rfile.read(length))
            bodies.append({**body, "key": self.headers["Authorization"]})
            self.reply(*left.pop(0))

        def reply(self, status: int, content: Any) -> None:
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_port}", bodies
        finally:
            made.shutdown()
            thread.join()


def test_logprobs_of_the_prompt_are_returned() -> None:
    with server((200, answer())) as (url, bodies):
        found = prompt_logprobs(f"{url}/v1/", [5, 6, 7], api_key="secret")
    assert found.model == "small"
    assert found.logprobs == (-0.5, -1.5)
    assert found.top == ({"a": -0.5, "b": -1.0}, {"c": -0.1})
    (body,) = bodies
    assert (body["prompt"], body["echo"], body["logprobs"]) == ([5, 6, 7], True, 20)
    assert body["key"] == "Bearer secret"


def test_a_server_that_reports_fewer_tokens_is_asked_again() -> None:
    with server((400, {"error": "at most 5"}), (200, answer())) as (url, bodies):
        prompt_logprobs(url, [5, 6, 7], model="small")
    assert [body["logprobs"] for body in bodies] == [20, 5]


def test_top_tokens_are_optional() -> None:
    with server((200, answer(top_logprobs=None))) as (url, _):
        assert prompt_logprobs(url, [5, 6, 7]).top == ({}, {})


WRONG = {
    "status": (500, {"error": "broken"}),
    "not json": (200, b"<html>"),
    "no choices": (200, {"choices": []}),
    "no logprobs": (200, {"choices": [{"logprobs": None}]}),
    "too few": (200, answer(token_logprobs=[None, -0.5])),
    "missing": (200, answer(token_logprobs=[None, -0.5, None])),
    "positive": (200, answer(token_logprobs=[None, -0.5, 3.0])),
    "positive top": (200, answer(top_logprobs=[None, {"a": 3.0}, {}])),
    "not a number": (200, answer(token_logprobs=[None, -0.5, "x"])),
    "fewer tops": (200, answer(top_logprobs=[None, {"a": -0.5}])),
    "large": (200, b" " * 2000),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_answer_is_an_error(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "MAX_ANSWER_BYTES", 1000)
    with server(WRONG[case]) as (url, _), pytest.raises(IngotError) as error:
        prompt_logprobs(url, [5, 6, 7])
    assert "echo" in error.value.hint


def test_a_server_that_does_not_run_is_an_error() -> None:
    with server() as (url, _):
        pass
    with pytest.raises(IngotError, match="cannot reach"):
        prompt_logprobs(url, [5, 6, 7])


def test_only_http_is_a_url() -> None:
    assert is_url("https://host/v1")
    assert not any(map(is_url, ("file:///etc/passwd", "smollm2", "org/name", "C:/x")))
