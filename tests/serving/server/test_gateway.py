"""Several models on one address, with memory for two of them: the server is real, its engines
repeat prompts. `test_pool.py` has real models."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import models
from tests.serving.conftest import Served, serving
from tests.serving.load import LoadReport, ask
from tests.serving.server.test_adapters import admin

ASK: dict[str, Any] = {"prompt": "Hello", "max_tokens": 5, "temperature": 0}
ECHO = "tests.serving.echo"
FILE = """
memory_gib = 1.0
[deployments.home]
model = "home"
pinned = true
kv_cache_gib = 0.02
[deployments.a]
model = "a"
kv_cache_gib = 0.02
[deployments.b]
model = "b"
kv_cache_gib = 0.02
adapters = { b-lora = "lora" }
max_loras = 2
max_requests = 20
[deployments.broken]
model = "broken"
kv_cache_gib = 0.02
"""


@pytest.fixture(scope="module")
def folder(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of four models, one of which cannot be loaded."""
    folder = tmp_path_factory.mktemp("fleet")
    shutil.copytree(directory, folder / "home")
    shutil.copytree(directory, folder / "a")
    models.small(folder / "b", max_seq_len=512)
    shutil.copytree(directory, folder / "broken")
    (folder / "broken" / "config.json").write_text('{"model_type": "unheard_of"}')
    (folder / "fleet.toml").write_text(FILE)
    return folder


@pytest.fixture(scope="module")
def fleet(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    log = tmp_path_factory.mktemp("server")
    with serving(folder / "fleet.toml", log, module=ECHO) as served:
        yield served


def complete(served: Served, model: str, **more: Any) -> tuple[int, dict[str, Any], dict[str, str]]:
    return served.call("/v1/completions", {**ASK, "model": model, **more})


def statuses(served: Served) -> dict[str, str]:
    return {one["id"]: one["status"] for one in served.call("/v1/models")[1]["data"]}


def workers(served: Served) -> dict[str, int]:
    """The processes of the engines by the name of their directory."""
    names = {worker: Path(f"/proc/{worker}/comm").read_text() for worker in served.workers}
    return {name.removeprefix("ingot ").strip(): worker for worker, name in names.items()}


def test_models_are_loaded_on_demand_and_evicted(fleet: Served) -> None:
    assert statuses(fleet) == {
        "home": "ready",
        "a": "unloaded",
        "b": "unloaded",
        "b-lora": "unloaded",
        "broken": "unloaded",
    }
    status, answer, _ = complete(fleet, "a")
    assert (status, answer["model"], answer["choices"][0]["text"]) == (200, "a", "Hello")
    listed = fleet.call("/v1/models/a")[1]
    assert (listed["status"], listed["pinned"], listed["max_model_len"]) == ("ready", False, 4096)
    assert complete(fleet, "b")[0] == 200
    assert statuses(fleet)["a"] == "unloaded", "there is memory for one besides the pinned one"
    assert set(workers(fleet)) == {"home", "b"}
    assert complete(fleet, "a")[0] == 200
    assert fleet.metric("ingot:model_loads", model_name="a") == 2
    assert fleet.metric("ingot:model_loads", model_name="home") == 1
    assert fleet.metric("ingot:memory_reserved_bytes") <= 2**30
    assert fleet.metric("vllm:request_success_total", model_name="b") == 1, "kept when unloaded"


def test_the_name_selects_the_model(fleet: Served) -> None:
    lengths = {
        name: fleet.call("/tokenize", {"model": name, "prompt": "a"})[1]["max_model_len"]
        for name in ("home", "b", "b-lora")
    }
    assert lengths == {"home": 4096, "b": 512, "b-lora": 512}
    for name in ("c", ""):
        with pytest.raises(openai.NotFoundError) as error:
            fleet.client().completions.create(model=name, **ASK)
        assert error.value.code == "model_not_found"
        assert "use 'home', 'a', 'b', 'b-lora', 'broken'" in str(error.value)
    assert fleet.call("/v1/models/c")[0] == 404
    messages: Any = [{"role": "user", "content": "Hello"}]
    body = {"model": "b", "messages": messages, "max_tokens": 3}
    assert fleet.call("/v1/messages", body)[1]["model"] == "b"
    body = {"model": "b", "input": "Hello", "max_output_tokens": 16}
    assert fleet.call("/v1/responses", body)[1]["model"] == "b"
    status, answer, _ = fleet.call("/v1/embeddings", {"model": "b", "input": "Hello"})
    assert status == 400
    assert "'b' does not support embeddings" in answer["error"]["message"]


def test_a_model_that_cannot_be_loaded_is_an_error_with_its_cause(fleet: Served) -> None:
    complete(fleet, "a")
    status, answer, headers = complete(fleet, "broken")
    assert status == 503
    assert "'broken' could not be loaded" in answer["error"]["message"]
    assert "unheard_of" in answer["error"]["message"]
    assert 1 <= int(headers["retry-after"]) <= 31
    assert statuses(fleet)["broken"] == "failed"
    start, loads = time.monotonic(), fleet.metric("ingot:model_loads")
    assert complete(fleet, "broken")[0] == 503
    assert time.monotonic() - start < 1, "it is not tried again at once"
    assert complete(fleet, "home")[0] == 200
    assert complete(fleet, "a")[0] == 200
    assert fleet.metric("ingot:model_loads") == loads + 1


def test_a_busy_model_is_not_evicted(fleet: Served) -> None:
    complete(fleet, "a")
    long = {**ASK, "model": "a", "max_tokens": 1500, "ignore_eos": True}

    async def run() -> None:
        alone = asyncio.create_task(ask(fleet, long))
        while not fleet.metric("ingot:requests_in_flight", model_name="a"):
            await asyncio.sleep(0.01)
        status, answer, headers = await asyncio.to_thread(complete, fleet, "b", timeout=0.3)
        assert status == 503
        assert "no memory to load 'b'" in answer["error"]["message"]
        assert "'home' is pinned, 'a' is busy" in answer["error"]["message"]
        assert headers["retry-after"]
        # A request that may wait gets the memory, however many requests the other has.
        others = [asyncio.create_task(ask(fleet, {**ASK, "model": "b"}))]
        await asyncio.sleep(0.2)
        others += [asyncio.create_task(ask(fleet, {**ASK, "model": "a"})) for _ in range(5)]
        found = await asyncio.gather(alone, *others)
        assert [(one.status, one.done) for one in found] == [(200, True)] * 7

    asyncio.run(run())


def test_many_requests_of_all_models_at_a_time(fleet: Served) -> None:
    names = ["a", "b", "home", "b-lora"] * 6
    with ThreadPoolExecutor(len(names)) as threads:
        found = list(threads.map(lambda name: complete(fleet, name), names))
    assert [status for status, _, _ in found] == [200] * len(names)
    assert [answer["model"] for _, answer, _ in found] == names
    assert fleet.metric("ingot:memory_reserved_bytes") <= 2**30


def test_a_bounded_number_of_requests_waits(fleet: Served) -> None:
    complete(fleet, "a")

    async def run() -> list[LoadReport]:
        return await asyncio.gather(*[ask(fleet, {**ASK, "model": "b"}) for _ in range(50)])

    found = asyncio.run(run())
    assert {one.status for one in found} == {200, 429}
    assert sum(one.status == 200 for one in found) >= 20, "max_requests of b"
    assert all(one.retry for one in found if one.status == 429)


def test_adapters_of_several_models(fleet: Served, folder: Path) -> None:
    lora = str(folder / "lora")
    body: dict[str, Any] = {"lora_name": "more", "lora_path": lora}
    assert admin(fleet, "/v1/load_lora_adapter", body)[0] == 404, "it has no model"
    for taken in ("home", "b-lora"):
        taken_body = {**body, "lora_name": taken, "model": "a"}
        assert admin(fleet, "/v1/load_lora_adapter", taken_body)[0] == 422
    complete(fleet, "a")
    assert admin(fleet, "/v1/load_lora_adapter", {**body, "model": "b"})[0] == 200, "b is loaded"
    expected = complete(fleet, "b-lora")[1]["choices"]
    complete(fleet, "a")
    assert statuses(fleet)["more"] == "unloaded", "it is known while its model is unloaded"
    assert complete(fleet, "more")[1]["choices"] == expected
    assert admin(fleet, "/v1/unload_lora_adapter", {"lora_name": "more"})[0] == 200
    assert complete(fleet, "more")[0] == 404


def test_an_engine_that_dies_is_restarted_and_does_not_affect_others(fleet: Served) -> None:
    complete(fleet, "a")
    home, before = workers(fleet)["home"], fleet.metric("ingot:engine_restarts", model_name="a")
    os.kill(workers(fleet)["a"], signal.SIGKILL)
    fleet.wait(lambda: statuses(fleet)["a"] == "loading")
    status, answer, _ = complete(fleet, "a")
    assert (status, "the engine is" in answer["error"]["message"]) == (503, True)
    assert complete(fleet, "home")[0] == 200
    assert fleet.call("/readyz")[0] == 200
    fleet.wait(lambda: statuses(fleet)["a"] == "ready", 30)
    assert complete(fleet, "a")[0] == 200
    assert workers(fleet)["home"] == home
    assert fleet.metric("ingot:engine_restarts", model_name="a") == before + 1
    complete(fleet, "b")
    assert fleet.metric("ingot:engine_restarts", model_name="a") == before + 1


def test_a_drain_answers_requests_that_wait(folder: Path, tmp_path: Path) -> None:
    with (
        serving(folder / "fleet.toml", tmp_path, module=ECHO) as served,
        ThreadPoolExecutor(1) as thread,
    ):
        waiting = thread.submit(complete, served, "a")
        served.wait(lambda: statuses(served)["a"] == "loading")
        served.process.send_signal(signal.SIGTERM)
        status, answer, _ = waiting.result(20)
        assert status == 503
        assert "shutting down" in answer["error"]["message"]
        assert served.process.wait(20) == 0
