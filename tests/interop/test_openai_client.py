"""Requests to a server that is overloaded, rejects them, or answers something else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ingot.core.errors import ConfigError
from ingot.interop import openai_client
from ingot.interop.openai_client import HttpStatusError, OpenAIClient, ServerError, base_url
from tests import openai_server
from tests.openai_server import Responses, answering

GOOD = (200, {"text": "Paris"}, {})


class Completion(msgspec.Struct):
    text: str


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "_pause", lambda attempt, after: 0.001)


def complete(url: str) -> str:
    return OpenAIClient(url, "secret").send("completions", Completion, {"prompt": "a"}).text


@pytest.mark.parametrize("status", [429, 502, 503, 504, 0])
def test_an_overloaded_server_is_asked_again(status: int) -> None:
    failure = (status, {"error": {"message": "busy"}}, {"retry-after": "1"})
    responses = Responses(failure, failure, GOOD)
    with answering(responses) as url:
        assert complete(url) == "Paris"
    assert len(responses.requests) == 3


def test_a_server_that_stays_overloaded_is_an_error() -> None:
    responses = Responses((503, b"down", {}))
    with answering(responses) as url, pytest.raises(ServerError, match="503: down") as error:
        complete(url)
    assert len(responses.requests) == openai_client.MAX_ATTEMPTS
    assert "continues" in error.value.hint


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500])
def test_a_rejected_request_is_not_repeated(status: int) -> None:
    responses = Responses((status, {"error": {"message": "no"}}, {}))
    with answering(responses) as url, pytest.raises(HttpStatusError) as error:
        complete(url)
    assert (error.value.status, error.value.message) == (status, "no")
    assert len(responses.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_the_key_does_not_follow_a_redirect(status: int) -> None:
    other = Responses(GOOD)
    with answering(other) as elsewhere:
        moved = Responses((status, b"", {"location": f"{elsewhere}/v1/completions"}))
        with answering(moved) as url, pytest.raises(HttpStatusError):
            complete(url)
    assert (len(moved.requests), len(other.requests)) == (1, 0)


@pytest.mark.parametrize("content", [b"<html>", b"\xff", b"{}", b"[" * 100_000, b'{"text": 1}'])
def test_another_format_is_an_error(content: bytes) -> None:
    with (
        answering(Responses((200, content, {}))) as url,
        pytest.raises(ServerError, match="not in OpenAI's format"),
    ):
        complete(url)


def test_a_long_response_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "MAX_BODY", 100)
    with (
        answering(Responses((200, b" " * 101, {}))) as url,
        pytest.raises(ServerError, match="more than 100 bytes"),
    ):
        complete(url)


def test_addresses() -> None:
    assert base_url("https://example.com:1/v1/") == "https://example.com:1/v1"
    for url in ("ftp://x", "http://", "http://host?key=1"):
        with pytest.raises(ConfigError, match="not the URL"):
            base_url(url)
    with pytest.raises(ConfigError, match="password"):
        base_url("http://user:secret@host")


def test_models_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(Responses(GOOD)) as url:
        client = OpenAIClient(url)
        assert client.find_model() == client.find_model("one") == "one"
        with pytest.raises(ServerError, match="lacks that model: one"):
            client.find_model("two")
        models: list[dict[str, Any]] = [{"id": "one"}, {"id": "two"}]
        monkeypatch.setitem(openai_server.MODELS, "data", models)
        with pytest.raises(ServerError, match="several models: one, two"):
            client.find_model()
    with pytest.raises(ServerError, match="refused") as error:
        client.find_model()
    assert "running" in error.value.hint
