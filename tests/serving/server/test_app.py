"""Endpoints of the main and the admin listener."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

import openai
import pytest

from tests.serving.conftest import Served

USER: list[Any] = [{"role": "user", "content": "Hello"}]


def test_endpoints_respond(served: Served) -> None:
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


def test_admin_endpoints_are_not_on_the_main_listener(served: Served) -> None:
    for path in ("/metrics", "/drain"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(served.url + path)


def test_embeddings_are_rejected_with_a_reason(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="does not support embeddings"):
        served.client().embeddings.create(model="small", input="Hello")
