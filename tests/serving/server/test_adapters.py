"""Adapters over HTTP: a real server process and OpenAI's client."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from ingot.interop import hf
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.workflows.llm import LLM
from tests import adapters
from tests.serving.conftest import Served, serving

ASK: dict[str, Any] = {"prompt": "Hello", "max_tokens": 12, "temperature": 0.0, "logprobs": 0}


@pytest.fixture(scope="module")
def directories(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    decoder, folder = hf.load(directory), tmp_path_factory.mktemp("adapters")
    return {f"a{seed}": adapters.save(decoder, folder / f"a{seed}", seed) for seed in range(4)}


@pytest.fixture(scope="module")
def lora(
    directory: Path, directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server with two adapters and room for a third."""
    options = [f"--adapter={name}={directories[name]}" for name in ("a0", "a1")]
    folder = tmp_path_factory.mktemp("server")
    with serving(directory, folder, *options, "--max-loras", "3") as served:
        yield served


@pytest.fixture(scope="module")
def expected(directory: Path, directories: dict[str, Path]) -> dict[str, Any]:
    """The log-probabilities of the answers, computed in this process."""
    llm = LLM(directory, adapters=directories)
    params = SamplingParams(temperature=0.0, logprobs=0)
    return {
        name: [
            one.logprob
            for one in llm.generate("Hello", params, max_tokens=12, adapter=name).logprobs or ()
        ]
        for name in ("", *directories)
    }


def logprobs(served: Served, model: str) -> list[float]:
    answer = served.client().completions.create(model=model, **ASK)
    assert answer.model == (model or "small")
    found = answer.choices[0].logprobs
    assert found is not None
    return found.token_logprobs  # type: ignore


def admin(served: Served, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    headers = {"content-type": "application/json"}
    call = urllib.request.Request(served.admin + path, json.dumps(body).encode(), headers)
    try:
        response = urllib.request.urlopen(call, timeout=60)
    except urllib.error.HTTPError as error:
        response = error
    with response:
        return response.status or 0, json.loads(response.read())


def load(served: Served, name: str, path: Path, **more: Any) -> tuple[int, dict[str, Any]]:
    return admin(
        served, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more}
    )


def unload(served: Served, name: str) -> tuple[int, dict[str, Any]]:
    return admin(served, "/v1/unload_lora_adapter", {"lora_name": name})


def test_the_model_of_a_request_selects_the_adapter(lora: Served, expected: dict[str, Any]) -> None:
    assert logprobs(lora, "a0") == expected["a0"]
    assert logprobs(lora, "a1") == expected["a1"]
    assert logprobs(lora, "small") == logprobs(lora, "") == expected[""]
    assert len({tuple(one) for one in expected.values()}) == 5


def test_an_unknown_model_is_404(lora: Served) -> None:
    for call in (
        lambda: lora.client().completions.create(model="a9", **ASK),
        lambda: lora.client().chat.completions.create(
            model="a9", messages=[{"role": "user", "content": "Hello"}]
        ),
        lambda: lora.client().models.retrieve("a9"),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            call()
        assert error.value.code == "model_not_found"
        assert error.value.param == "model"


def test_models_are_listed_with_their_parent(lora: Served) -> None:
    listed = {model.id: model.model_extra for model in lora.client().models.list()}
    assert {name: extra["parent"] for name, extra in listed.items() if extra} == {
        "small": None,
        "a0": "small",
        "a1": "small",
    }
    assert lora.client().models.retrieve("a1").id == "a1"


def test_chats_and_streams_use_the_adapter(lora: Served) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}]
    options: dict[str, Any] = {"messages": messages, "max_tokens": 8, "temperature": 0.0}
    texts = [
        lora.client().chat.completions.create(model=model, **options).choices[0].message.content
        for model in ("small", "a0")
    ]
    assert texts[0] != texts[1]
    stream = lora.client().chat.completions.create(model="a0", stream=True, **options)
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == texts[1]
    assert {chunk.model for chunk in chunks} == {"a0"}


def test_adapters_are_loaded_and_unloaded_while_it_serves(
    lora: Served, directories: dict[str, Path], expected: dict[str, Any]
) -> None:
    status, body = load(lora, "extra", directories["a2"])
    assert (status, body["id"], body["rank"]) == (200, "extra", 4)
    assert logprobs(lora, "extra") == expected["a2"]
    status, body = load(lora, "extra", directories["a3"])
    assert status == 422
    assert "loaded already" in body["error"]["message"]
    assert load(lora, "extra", directories["a3"], load_inplace=True)[0] == 200
    assert logprobs(lora, "extra") == expected["a3"], "not the blocks of the old file"
    status, body = load(lora, "fourth", directories["a2"])
    assert status == 422
    assert "all 3 slots are in use" in body["error"]["message"]
    assert unload(lora, "extra") == (200, {"id": "extra"})
    assert unload(lora, "extra")[0] == 404
    with pytest.raises(openai.NotFoundError):
        logprobs(lora, "extra")
    assert logprobs(lora, "a1") == expected["a1"]


def test_an_adapter_with_running_requests_is_unloaded_cleanly(
    lora: Served, directories: dict[str, Path]
) -> None:
    assert load(lora, "busy", directories["a2"])[0] == 200
    ask: dict[str, Any] = {**ASK, "max_tokens": 400, "logprobs": None}
    whole = lora.client().completions.create(model="busy", **ask).choices[0].text
    stream = lora.client().completions.create(model="busy", stream=True, **ask)
    text = next(stream).choices[0].text
    assert unload(lora, "busy")[0] == 200
    with pytest.raises(openai.NotFoundError):
        lora.client().completions.create(model="busy", **ASK)
    assert text + "".join(chunk.choices[0].text for chunk in stream) == whole


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"lora_name": "x"},
        {"lora_name": "x", "lora_path": "/nowhere"},
        {"lora_name": "small", "lora_path": "/nowhere"},
        {"lora_name": "no spaces", "lora_path": "/nowhere"},
        {"lora_name": "x" * 129, "lora_path": "/nowhere"},
        {"lora_name": "x", "lora_path": "/nowhere", "more": 1},
    ],
)
def test_what_cannot_be_loaded_is_an_error_in_openai_format(
    lora: Served, body: dict[str, Any]
) -> None:
    status, answer = admin(lora, "/v1/load_lora_adapter", body)
    assert status == 422
    assert answer["error"]["type"] == "invalid_request_error"
    assert logprobs(lora, "a0")


def test_the_main_listener_loads_nothing(lora: Served) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        assert lora.call(path, {"lora_name": "a0", "lora_path": "/nowhere"})[0] == 404


def test_a_new_worker_has_the_adapters_of_the_last(
    directory: Path, directories: dict[str, Path], tmp_path: Path, expected: dict[str, Any]
) -> None:
    gone = shutil.copytree(directories["a2"], tmp_path / "gone")
    option = f"--adapter=a0={directories['a0']}"
    with serving(directory, tmp_path, option, "--max-loras", "3") as served:
        assert load(served, "a1", directories["a1"])[0] == 200
        assert load(served, "gone", gone)[0] == 200
        shutil.rmtree(gone)
        os.kill(served.worker, signal.SIGKILL)
        served.wait(lambda: not served.ready())
        served.wait(served.ready, 60)
        assert [logprobs(served, name) for name in ("a0", "a1")] == [
            expected["a0"],
            expected["a1"],
        ]
        assert [model.id for model in served.client().models.list()] == ["small", "a0", "a1"]


def test_a_broken_adapter_ends_the_start_with_its_reason(directory: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ingot", "serve", str(directory), "--port", "0"]
    found = subprocess.run(
        [*command, f"--adapter=a={tmp_path}"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert "adapter_config.json not found" in found.stderr
