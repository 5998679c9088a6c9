"""What OpenAI's clients send: every number bounded, and a schema that strange requests are made
of (schemathesis)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from ingot.serving.engine.sampling_params import Grammar
from ingot.serving.server.messages import MessagesRequest
from ingot.serving.server.openai import (
    ChatRequest,
    CommonParams,
    CompletionRequest,
    EmbeddingRequest,
    ResponseFormat,
    TokenizeRequest,
)
from ingot.serving.server.responses import ResponsesRequest
from tests.serving.conftest import Served, serving
from tests.serving.fuzz import send_strange

BODIES = (
    *(CompletionRequest, ChatRequest, EmbeddingRequest, TokenizeRequest),
    *(MessagesRequest, ResponsesRequest),
)


def test_options_are_the_engines() -> None:
    asked = CompletionRequest.model_validate(
        {
            "prompt": "a",
            "temperature": 0.5,
            "top_k": -1,
            "stop": "x",
            "logit_bias": {"7": -3},
            "response_format": {"type": "json_object"},
        }
    )
    options = asked.sampling_params((2,), 99, logprobs=None)
    assert (options.temperature, options.top_k, options.seed) == (0.5, None, 99)
    assert options.logit_bias == ((7, -3.0),)
    assert options.stop_token_ids == (2,)
    assert options.grammar is not None
    assert json.loads(options.grammar.text)["type"] == "object"
    assert asked.stop_strings() == ("x",)
    never = CommonParams(ignore_eos=True, seed=-4, top_k=5).sampling_params((2,), 99)
    assert (never.stop_token_ids, never.seed, never.top_k) == ((), -4, 5)


@pytest.mark.parametrize(
    ("form", "kind", "text"),
    [
        ({"type": "text"}, None, ""),
        ({"type": "regex", "regex": "a+"}, "regex", "a+"),
        ({"type": "grammar", "grammar": 'start: "a"'}, "lark", 'start: "a"'),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}},
            "json_schema",
            Grammar.of_schema({"type": "array"}).text,
        ),
    ],
)
def test_a_format_is_a_grammar(form: dict[str, Any], kind: str | None, text: str) -> None:
    grammar = ResponseFormat.model_validate(form).constraint()
    assert (grammar and grammar.kind, grammar.text if grammar else "") == (kind, text)


def bounds(model: type[BaseModel]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every number, string and list in a model's schema, with where it stands."""

    def walk(place: str, node: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(node, list):
            for one in node:
                yield from walk(place, one)
        if not isinstance(node, dict):
            return
        if node.get("type") in ("integer", "number", "string", "array") and "const" not in node:
            yield place, node
        for name, inner in node.items():
            yield from walk(f"{place}.{name}", inner)

    yield from walk(model.__name__, model.model_json_schema())


@pytest.mark.parametrize("model", BODIES)
def test_everything_has_a_bound(model: type[BaseModel]) -> None:
    upper = {"string": "maxLength", "array": "maxItems"}
    for place, node in bounds(model):
        if "enum" in node or (node["type"] == "array" and "enum" in str(node.get("items"))):
            continue
        if node["type"] in upper:
            assert upper[node["type"]] in node or "const" in str(node), place
        else:
            assert {"maximum", "exclusiveMaximum"} & set(node), place
            assert {"minimum", "exclusiveMinimum"} & set(node), place


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), True, "1", [1]])
def test_non_finite_number_is_rejected(value: Any) -> None:
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "timeout"):
        with pytest.raises(ValidationError):
            CompletionRequest.model_validate({"prompt": "a", name: value})


@pytest.fixture(scope="module")
def hasty(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server that gives up soon: strange requests may ask for a lot."""
    with serving(directory, tmp_path_factory.mktemp("hasty"), "--timeout", "0.5") as made:
        yield made


@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.slow)])
def test_strange_requests(
    hasty: Served, count: int, record_property: Callable[[str, int], None]
) -> None:
    sent = send_strange(hasty, count)
    assert sent > 8 * count
    hasty.wait(hasty.quiet)
    assert hasty.metric("ingot:http_responses_total", status="500") == 0
    assert hasty.metric("ingot:engine_restarts") == 0
    hasty.tokens()
    record_property("strange requests", sent)
