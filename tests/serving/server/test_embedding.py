"""`/v1/embeddings` of a real server with a real encoder, by the real client."""

from __future__ import annotations

import base64
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from ingot.workflows.embed import Embedder
from tests.serving.conftest import Served, serving

TEXTS = [f"Sentence number {n}" + ", and so forth" * (n % 9) + "." for n in range(32)]


@pytest.fixture(scope="module")
def embedder(minilm: Path) -> Embedder:
    return Embedder(minilm)


@pytest.fixture(scope="module")
def server(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(minilm, tmp_path_factory.mktemp("embeddings"), "--max-requests", "20") as made:
        yield made


def embed(server: Served, input: Any, **options: Any) -> torch.Tensor:
    with server.client(max_retries=10) as client:  # 503 while no engine is up
        answer = client.embeddings.create(model="minilm", input=input, **options)
    assert [one.index for one in answer.data] == list(range(len(answer.data)))
    return torch.tensor([one.embedding for one in answer.data])


def test_embeddings_have_the_bits_of_the_embedder(server: Served, embedder: Embedder) -> None:
    expected = embedder.embed(TEXTS)
    ids = [embedder.tokenizer.encode(text) for text in TEXTS]
    assert torch.equal(embed(server, TEXTS), expected)  # base64, the default of the client
    assert torch.equal(embed(server, TEXTS, encoding_format="float"), expected)
    assert torch.equal(embed(server, ids, dimensions=384), expected)
    assert torch.equal(embed(server, TEXTS[5]), expected[5:6])
    assert torch.equal(embed(server, ids[5]), expected[5:6])


def test_embeddings_of_a_killed_engine_are_computed_by_the_next(
    server: Served, embedder: Embedder
) -> None:
    expected, retries = embedder.embed(TEXTS), server.metric("ingot:request_retries")
    with ThreadPoolExecutor(8) as clients:
        asked = [clients.submit(embed, server, TEXTS) for _ in range(8)]
        server.wait(lambda: server.metric("ingot:requests_in_flight") >= 4)
        os.kill(server.worker, signal.SIGKILL)
        assert all(torch.equal(one.result(), expected) for one in asked)
    assert server.metric("ingot:request_retries") >= retries + len(TEXTS)


def test_formats_and_usage(server: Served, embedder: Embedder) -> None:
    num_tokens = sum(len(embedder.tokenizer.encode(text)) for text in TEXTS[:3])
    for encoding in ("float", "base64", None):
        body = {"input": TEXTS[:3], "encoding_format": encoding}
        status, answer, _ = server.call("/v1/embeddings", body)
        assert (status, answer["object"], answer["model"]) == (200, "list", "minilm")
        assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        first = answer["data"][0]
        assert (first["object"], first["index"]) == ("embedding", 0)
        value = first["embedding"]
        assert (
            len(base64.b64decode(value)) == 4 * 384 if encoding == "base64" else len(value) == 384
        )


def test_texts_of_a_request_are_one_batch(server: Served) -> None:
    before = server.metric("ingot:engine_steps_total")
    embed(server, TEXTS)
    assert server.metric("ingot:engine_steps_total") == before + 1


def test_concurrent_requests_get_their_own_embeddings(server: Served, embedder: Embedder) -> None:
    expected = embedder.embed(TEXTS)
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda text: embed(server, text), TEXTS))
    assert torch.equal(torch.cat(rows), expected)
    server.wait(server.quiet)


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"dimensions": 128}, 422, "dimensions: must be 384"),
        ({"input": "word " * 300}, 400, "input.0 has 302 tokens; a text may have 256"),
        ({"input": [[5], [40_000]]}, 422, "input.1: token ids must be below 30,522"),
        ({"input": []}, 422, "input"),
        ({"input": [[]]}, 422, "input"),
        ({"input": ["x"] * 2049}, 422, "input"),
        ({"encoding_format": "int8"}, 422, "encoding_format"),
        ({"model": "other"}, 404, "model 'other' not found"),
    ],
)
def test_impossible_requests_get_their_status(
    change: dict[str, Any], status: int, message: str, server: Served
) -> None:
    found, answer, _ = server.call("/v1/embeddings", {"input": "Hello"} | change)
    assert found == status, answer
    assert message in answer["error"]["message"]
    assert server.quiet()


def test_inference_of_texts_has_the_same_bits(server: Served, embedder: Embedder) -> None:
    expected = embedder.embed(TEXTS)
    text = {"name": "text", "datatype": "BYTES", "shape": [len(TEXTS)]}
    status, answer, _ = server.call("/v2/models/minilm/infer", {"inputs": [text | {"data": TEXTS}]})
    assert status == 200, answer
    (output,) = answer["outputs"]
    assert (output["name"], output["shape"]) == ("embedding", [len(TEXTS), 384])
    assert torch.equal(torch.tensor(output["data"]).view(-1, 384), expected)
    data = b"".join(len(t.encode()).to_bytes(4, "little") + t.encode() for t in TEXTS)
    body = json.dumps({"inputs": [text | {"parameters": {"binary_data_size": len(data)}}]}).encode()
    headers = {"inference-header-content-length": str(len(body))}
    status, found, _ = server.call("/v2/models/minilm/infer", body + data, **headers)
    assert found["outputs"] == answer["outputs"]
    assert server.call("/v2/models/minilm")[1]["inputs"][0]["datatype"] == "BYTES"


@pytest.mark.parametrize(
    ("texts", "status", "message"),
    [
        (["word " * 300], 400, "input.0 has 302 tokens"),
        (["a"] * 2049, 400, "1 to 2,048 rows"),
        ([7], 400, "Expected `str`"),
        (["\ud800"], 200, ""),
    ],
)
def test_texts_that_cannot_be_inferred(
    texts: Any, status: int, message: str, server: Served
) -> None:
    one = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    found, answer, _ = server.call("/v2/models/minilm/infer", {"inputs": [one]})
    assert found in (status, 400), answer
    assert message in answer.get("error", "")
    assert server.quiet()


def test_encoders_generate_no_text(server: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="generates no text"):
        server.client().completions.create(model="minilm", prompt="Hello")
    assert server.call("/v1/chat/completions", {"messages": []})[0] == 422
    assert server.call("/tokenize", {"prompt": "Hello"})[1]["tokens"] == [101, 7592, 102]
