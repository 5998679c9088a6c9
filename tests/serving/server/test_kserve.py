"""The Open Inference Protocol of a real server: bits, batches, errors, and hostile clients."""

from __future__ import annotations

import json
import random
import socket
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from ingot.interop import classifier
from ingot.nn import CNN, CNNConfig
from tests.serving.conftest import Served, serving
from tests.serving.fuzz import HARMLESS, send_strange

SHAPE, CLASSES, MAX_ROWS = (2, 6, 5), 7, 16
MODEL = CNN.from_config(CNNConfig(in_channels=2, widths=(8, 16), num_classes=CLASSES), seed=0)
IMAGES = torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(0))
INFER = "/v2/models/shapes/infer"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("inference")
    (folder / "shapes").mkdir()
    classifier.save(MODEL, folder / "shapes", SHAPE)
    options = ("--max-requests", "40", "--max-batch-size", str(MAX_ROWS), "--timeout", "20")
    with serving(folder / "shapes", folder, *options, "--stall-timeout", "5") as made:
        yield made


@pytest.fixture(scope="module")
def logits() -> Tensor:
    with torch.inference_mode():
        return MODEL.eval()(IMAGES)


def json_body(images: Tensor = IMAGES[:1], **fields: Any) -> dict[str, Any]:
    one = {"name": "input", "datatype": "FP32", "shape": list(images.shape)}
    return {"inputs": [one | {"data": images.tolist()}], **fields}


def binary_body(images: Tensor, **fields: Any) -> tuple[bytes, dict[str, str]]:
    data = images.numpy().tobytes()
    one = {"name": "input", "datatype": "FP32", "shape": list(images.shape)}
    one["parameters"] = {"binary_data_size": len(data)}
    text = json.dumps({"inputs": [one], **fields}).encode()
    return text + data, {"inference-header-content-length": str(len(text))}


def infer(server: Served, images: Tensor) -> Tensor:
    """The logits, sent and received as binary data."""
    content, headers = binary_body(images, parameters={"binary_data_output": True})
    headers["content-type"] = "application/octet-stream"
    request = urllib.request.Request(server.url + INFER, content, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.headers["content-type"] == "application/octet-stream"
        size, answer = int(response.headers["inference-header-content-length"]), response.read()
    (output,) = json.loads(answer[:size])["outputs"]
    assert output["parameters"]["binary_data_size"] == len(answer) - size
    assert output["shape"] == [len(images), CLASSES]
    return torch.frombuffer(bytearray(answer[size:]), dtype=torch.float32).view(-1, CLASSES)


def test_json_and_binary_data_have_the_bits_of_the_model(server: Served, logits: Tensor) -> None:
    body = json_body(IMAGES[:5], id="number 7", outputs=[{"name": "logits"}])
    for flat in (False, True):
        if flat:
            body["inputs"][0]["data"] = IMAGES[:5].flatten().tolist()
        status, answer, headers = server.call(INFER, body)
        assert status == 200, answer
        assert headers["content-type"] == "application/json"
        (output,) = answer.pop("outputs")
        assert answer == {"model_name": "shapes", "model_version": "1", "id": "number 7"}
        found = torch.tensor(output.pop("data")).view(-1, CLASSES)
        assert output == {"name": "logits", "datatype": "FP32", "shape": [5, CLASSES]}
        assert torch.equal(found, logits[:5])
    assert torch.equal(infer(server, IMAGES[:5]), logits[:5])


def test_concurrent_requests_are_batched_and_get_their_own_rows(
    server: Served, logits: Tensor
) -> None:
    chance = random.Random(0)
    requests = [chance.choices(range(64), k=chance.choice((1, 1, 2, 7, 16))) for _ in range(96)]
    before = server.metric("ingot:engine_steps_total")
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda rows: infer(server, IMAGES[rows]), requests))
    for rows, one in zip(requests, found, strict=True):
        assert torch.equal(one, logits[rows])
    assert server.metric("ingot:engine_steps_total") - before < len(requests)
    server.wait(server.quiet)


def test_health_and_metadata(server: Served) -> None:
    assert server.call("/v2/health/live")[:2] == (200, {"live": True})
    assert server.call("/v2/health/ready")[:2] == (200, {"ready": True})
    assert server.call("/v2/models/shapes/ready")[:2] == (200, {"name": "shapes", "ready": True})
    assert server.call("/v2")[1]["extensions"] == ["binary_tensor_data"]
    assert server.call("/v2/models/shapes")[1] == {
        "name": "shapes",
        "versions": ["1"],
        "platform": "ingot",
        "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, *SHAPE]}],
        "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, CLASSES]}],
    }
    assert server.call("/v1/models")[1]["data"][0]["id"] == "shapes"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v2/models/other/infer", json_body(), 404, "model 'other' not found"),
        ("/v2/models/other", None, 404, "model 'other' not found"),
        ("/v2/models/other/ready", None, 404, "model 'other' not found"),
        ("/v2/models/shapes/versions/1/infer", json_body(), 404, "Not Found"),
        (INFER, b"{", 400, "not valid JSON"),
        (INFER, json_body(IMAGES[:17]), 400, "1 to 16 rows"),
        (INFER, json_body(IMAGES[:1, :, :5]), 400, "the shape must be [-1, 2, 6, 5]"),
        (INFER, json_body(outputs=[{"name": "x"}]), 400, "the model has 'logits'"),
        (INFER, None, 405, "Method Not Allowed"),
    ],
)
def test_errors_have_the_form_of_the_protocol(
    path: str, body: Any, status: int, message: str, server: Served
) -> None:
    found, answer, _ = server.call(path, body)
    assert found == status, answer
    assert list(answer) == ["error"]
    assert message in answer["error"]
    assert server.quiet()


def test_other_content_types_are_rejected(server: Served) -> None:
    content, headers = binary_body(IMAGES[:1])
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        assert server.call(INFER, json_body(), **{"content-type": kind})[0] == 415
        # Pages of other sites cannot send this header.
        assert server.call(INFER, content, **headers, **{"content-type": kind})[0] == 200
    binary = {"content-type": "application/octet-stream"}
    assert server.call("/v1/completions", json_body(), **binary)[0] == 415
    assert server.call("/v1/completions", json_body(), **headers, **binary)[0] == 415


def test_classifiers_have_no_text(server: Served) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    for path, body in (
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/messages", {"model": "shapes", "messages": messages, "max_tokens": 3}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/embeddings", {"input": "Hello"}),
        ("/tokenize", {"prompt": "Hello"}),
    ):
        status, answer, _ = server.call(path, body)
        assert status == 400, (path, answer)
        assert answer["error"]["code"] == "unsupported", path


def mutate(value: Any, chance: random.Random) -> Any:
    """Return a copy of JSON in which something is replaced, left out or doubled."""
    strange = (None, True, -1, 0, 2**63, 1e308, "", "FP16", [], {}, [[]], [None], "\ud800", 10**400)
    if chance.random() < 0.15:
        return chance.choice(strange)
    if isinstance(value, dict):
        found = {key: mutate(one, chance) for key, one in value.items()}
        if chance.random() < 0.2:
            found[chance.choice(("parameters", "outputs", "id", "data", "x"))] = chance.choice(
                (*strange, {"timeout": 1}, {"binary_data_size": 4}, [{"name": "logits"}])
            )
        return {key: one for key, one in found.items() if chance.random() > 0.05}
    if isinstance(value, list) and chance.random() < 0.7:
        return [mutate(one, chance) for one in value] * chance.choice((1, 1, 1, 2))
    return value


@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.slow)])
def test_strange_requests(
    server: Served, count: int, logits: Tensor, record_property: Callable[[str, int], None]
) -> None:
    chance, statuses = random.Random(count), dict[int, int]()
    for number in range(count):
        content, headers = binary_body(IMAGES[:2])
        if number % 3:
            content, headers = json.dumps(mutate(json_body(), chance)).encode(), {}
        elif chance.random() < 0.5:
            content = bytes(b if chance.random() < 0.99 else chance.randrange(256) for b in content)
        else:
            sizes = ("0", "-1", "", "99999999999", "12", "0x10", "٣".encode().decode("latin-1"))
            headers = {"inference-header-content-length": chance.choice(sizes)}
        if chance.random() < 0.2:
            content = content[: chance.randrange(len(content) + 1)]
        status, answer, _ = server.call(INFER, content, **headers)
        assert status in HARMLESS, (answer, content[:500])
        assert status == 200 or answer["error"], answer
        statuses[status] = statuses.get(status, 0) + 1
    assert statuses[400] > count // 2
    server.wait(server.quiet)
    assert server.metric("ingot:http_responses_total", status="500") == 0
    assert server.metric("ingot:engine_restarts") == 0
    assert torch.equal(infer(server, IMAGES[:3]), logits[:3])
    record_property("strange requests", count)


@pytest.mark.parametrize("count", [6, pytest.param(300, marks=pytest.mark.slow)])
def test_requests_of_the_schema(server: Served, count: int, logits: Tensor) -> None:
    assert send_strange(server, count, "/v2", "shapes") > 4 * count
    server.wait(server.quiet)
    assert server.metric("ingot:http_responses_total", status="500") == 0
    assert torch.equal(infer(server, IMAGES[:3]), logits[:3])


def test_clients_that_leave_are_forgotten(server: Served, logits: Tensor) -> None:
    content, headers = binary_body(IMAGES[:16])
    head = f"POST {INFER} HTTP/1.1\r\nhost: x\r\n" + "".join(
        f"{name}: {value}\r\n" for name, value in headers.items()
    )
    for size in (0, 50, len(content) - 1, len(content)):
        for _ in range(5):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(f"{head}content-length: {len(content)}\r\n\r\n".encode())
                connection.sendall(content[:size])
    server.wait(server.quiet)
    assert torch.equal(infer(server, IMAGES[:3]), logits[:3])
    assert server.metric("ingot:engine_restarts") == 0


def test_too_many_requests_are_rejected(server: Served) -> None:
    """All have an answer: the rows, or 429 with a time to retry."""
    content, headers = binary_body(IMAGES[:1])

    def send(_: int) -> int:
        return server.call(INFER, content, **headers)[0]

    with ThreadPoolExecutor(64) as pool:
        statuses = list(pool.map(send, range(256)))
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) > 40
    server.wait(server.quiet)


def test_impossible_deadlines_are_answered(server: Served) -> None:
    status, answer, _ = server.call(INFER, json_body(parameters={"timeout": 1}))
    assert status in (200, 504), answer
    assert server.call(INFER, json_body(parameters={"timeout": 10_000_000}))[0] == 200
