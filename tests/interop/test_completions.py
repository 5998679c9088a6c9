"""A server is not trusted: its answer is checked before a number of it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ingot.core.errors import IngotError
from ingot.interop import openai_client
from ingot.interop.completions import is_url, prompt_logprobs
from tests.openai_server import Responses, answering

GOOD: dict[str, Any] = {
    "token_logprobs": [None, -0.5, -1.5, -9.0],
    "top_logprobs": [None, {"a": -0.5, "b": -1.0}, {"c": -0.1}, {"d": -9.0}],
}


def answer(**changes: Any) -> dict[str, Any]:
    return {"choices": [{"text": "", "logprobs": {**GOOD, **changes}}]}


@contextmanager
def server(*answers: tuple[int, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Answer one completion after another; yield the address and the bodies received."""
    responses = Responses(*((status, content, {}) for status, content in answers))
    bodies: list[dict[str, Any]] = []
    with answering(responses) as url:
        yield url, bodies
        for _, headers, body in responses.requests:
            bodies.append({**body, "key": headers.get("authorization")})


def test_logprobs_of_the_prompt_are_returned() -> None:
    with server((200, answer())) as (url, bodies):
        found = prompt_logprobs(f"{url}/v1/", [5, 6, 7], api_key="secret")
    assert found.model == "one"
    assert found.logprobs == (-0.5, -1.5)
    assert found.top == ({"a": -0.5, "b": -1.0}, {"c": -0.1})
    (body,) = bodies
    assert (body["prompt"], body["echo"], body["logprobs"]) == ([5, 6, 7], True, 20)
    assert body["key"] == "Bearer secret"


def test_a_server_that_reports_fewer_tokens_is_asked_again() -> None:
    with server((400, {"error": "at most 5"}), (200, answer())) as (url, bodies):
        prompt_logprobs(url, [5, 6, 7], model="one")
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
    monkeypatch.setattr(openai_client, "MAX_BODY", 1000)
    with server(WRONG[case]) as (url, _), pytest.raises(IngotError) as error:
        prompt_logprobs(url, [5, 6, 7])
    assert "server" in error.value.hint


def test_a_server_that_does_not_run_is_an_error() -> None:
    with server() as (url, _):
        pass
    with pytest.raises(IngotError, match="refused"):
        prompt_logprobs(url, [5, 6, 7])


def test_only_http_is_a_url() -> None:
    assert is_url("https://host/v1")
    assert not any(map(is_url, ("file:///etc/passwd", "smollm2", "org/name", "C:/x")))
