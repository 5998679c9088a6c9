"""Models under a memory budget, measured: random requests, shared weights, time to load."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests import models
from tests.serving.conftest import Served, serving
from tests.serving.load import ask
from tests.serving.server.test_gateway import ASK, ECHO, complete, statuses

GIB = 2**30


def memory(served: Served) -> dict[str, int]:
    """The memory of the fork server and of all engine processes in bytes, by kind; what they share
    counts once."""
    total: dict[str, int] = {"Pss": 0, "Pss_Anon": 0, "Pss_Shmem": 0, "processes": 0}
    total["Anonymous"] = 0  # only of the fork server: the engines begin with this
    parents = served.fork_servers
    for child in (*parents, *served.workers):
        rows = Path(f"/proc/{child}/smaps_rollup").read_text().splitlines()[1:]
        total["processes"] += 1
        for name, value, *_ in map(str.split, rows):
            if name[:-1] in total and (name != "Anonymous:" or child in parents):
                total[name[:-1]] += int(value) * 1024
    return total


@contextmanager
def sampled(served: Served) -> Iterator[list[dict[str, int]]]:
    """Sample the memory while other code runs."""
    samples: list[dict[str, int]] = []
    done = threading.Event()

    def run() -> None:
        while not done.wait(0.02):
            try:
                samples.append(memory(served))
            except (OSError, ValueError):  # a process exited meanwhile
                continue

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield samples
    finally:
        done.set()
        thread.join()


def write(folder: Path, source: Path, budget: float, deployment: str, count: int = 6) -> Path:
    tables = [f"memory_gib = {budget}"]
    for number in range(count):
        shutil.copytree(source, folder / f"model{number}")
        tables.append(f'[deployments.m{number}]\nmodel = "model{number}"\n{deployment}')
    tables.append("pinned = true")
    (folder / "fleet.toml").write_text("\n".join(tables))
    return folder / "fleet.toml"


def send(served: Served, count: int, stay: float, clients: int) -> None:
    """Send random requests; a client asks the same model again with probability `stay`."""
    rng, left = random.Random(0), iter(range(count))

    async def client(model: int) -> None:
        for _ in left:
            model = model if rng.random() < stay else rng.randrange(6)
            body = {**ASK, "model": f"m{model}", "max_tokens": rng.choice((1, 5, 50))}
            found = await ask(served, {**body, "stream": rng.random() < 0.5})
            assert (found.status, found.done) == (200, True), found

    async def run() -> None:
        await asyncio.gather(*[client(number) for number in range(clients)])

    asyncio.run(run())


def check_random_requests(served: Served, budget: float, *requests: Any) -> None:
    with sampled(served) as samples:
        send(served, *requests)
    assert len(samples) > 20
    peak = max(samples, key=lambda one: one["Pss"])
    assert peak["Pss"] <= budget * GIB, peak
    assert max(one["processes"] for one in samples) == 4
    assert served.metric("ingot:memory_reserved_bytes") <= budget * GIB
    assert served.metric("ingot:model_loads", model_name="m5") == 1, "it is pinned"
    assert served.metric("ingot:model_loads") > 8, "models were evicted"
    assert served.metric("vllm:request_success_total") == requests[0]
    assert served.metric("ingot:requests_in_flight") == 0


def test_random_requests_stay_in_the_budget(directory: Path, tmp_path: Path) -> None:
    file = write(tmp_path, directory, 0.25, "memory_gib = 0.08\nkv_cache_gib = 0.03")
    with serving(file, tmp_path, module=ECHO) as served:
        check_random_requests(served, 0.25, 50, 0.6, 5)


@pytest.mark.slow
def test_500_random_requests_over_6_models_stay_in_the_budget(
    directory: Path, tmp_path: Path
) -> None:
    file = write(tmp_path, directory, 1.3, "kv_cache_gib = 0.02")
    with serving(file, tmp_path) as served:
        check_random_requests(served, 1.3, 500, 0.9, 3)


def twin(folder: Path, directory: Path, other: Path | None = None, budget: float = 4) -> Path:
    tables = [
        f'[deployments.{name}]\nmodel = "{model}"\nkv_cache_gib = 0.02'
        for name, model in (("one", directory), ("two", other or directory))
    ]
    (folder / "fleet.toml").write_text("\n".join([f"memory_gib = {budget}", *tables]))
    return folder / "fleet.toml"


def test_two_deployments_of_one_model_share_its_weights(
    served: Served, directory: Path, tmp_path: Path
) -> None:
    expected = served.call("/v1/completions", {**ASK, "logprobs": 2})[1]["choices"]
    with serving(twin(tmp_path, directory), tmp_path) as fleet:
        for name in ("one", "two"):
            assert complete(fleet, name, logprobs=2)[1]["choices"] == expected
        assert memory(fleet)["Pss_Shmem"] > 0, "the weights are in shared memory"
        sizes = [p.stat().st_size for p in directory.glob("*.safetensors")]
        reserved = fleet.metric("ingot:memory_reserved_bytes")
        assert memory(fleet)["Pss_Shmem"] < 1.15 * sum(sizes) + (1 << 22)
        assert memory(fleet)["Pss"] < reserved


@pytest.mark.slow
def test_the_weights_of_two_deployments_take_the_memory_of_one(
    tmp_path: Path, record_property: Callable[[str, float], None]
) -> None:
    """And two directories with the same weights take twice as much: what is measured is real."""
    directory = models.smollm2()
    copy = shutil.copytree(directory, tmp_path / "copy")
    weights = (directory / "model.safetensors").stat().st_size
    ratios: list[float] = []
    for other in (directory, copy):
        folder = tmp_path / f"{other.name}-twin"
        folder.mkdir()
        with serving(twin(folder, directory, other), folder) as served:
            assert complete(served, "one")[0] == 200
            alone = memory(served)
            assert complete(served, "two")[0] == 200
            both = memory(served)
            # Without files: libraries are shared by all processes of the machine.
            own = [o["Pss_Anon"] + o["Pss_Shmem"] - o["Anonymous"] for o in (alone, both)]
            ratios.append((own[1] - 2 * (own[0] - weights)) / weights)
            assert both["Pss"] < served.metric("ingot:memory_reserved_bytes")
    record_property("weights of two deployments, in weights of one", ratios[0])
    record_property("of two directories", ratios[1])
    assert ratios[0] < 1.15
    assert ratios[1] > 1.9


@pytest.mark.slow
def test_an_embedding_model_and_a_decoder_of_one_server(directory: Path, tmp_path: Path) -> None:
    tables = [f'[deployments.text]\nmodel = "{directory}"']
    tables += [f'[deployments.{name}]\nmodel = "{models.minilm()}"' for name in ("one", "two")]
    (tmp_path / "fleet.toml").write_text("\n".join(["memory_gib = 6", *tables]))
    with serving(tmp_path / "fleet.toml", tmp_path) as served:
        assert complete(served, "text")[0] == 200
        found = [
            served.call("/v1/embeddings", {"model": name, "input": "Hello"})
            for name in ("one", "two")
        ]
        assert [status for status, _, _ in found] == [200, 200]
        assert found[0][1]["data"] == found[1][1]["data"]
        assert complete(served, "one")[0] == 400
        assert memory(served)["Pss_Shmem"] > 0
        assert memory(served)["Pss"] < served.metric("ingot:memory_reserved_bytes")


@pytest.mark.slow
def test_an_evicted_model_answers_within_its_load_time_and_a_second(
    tmp_path: Path, record_property: Callable[[str, float], None]
) -> None:
    directory = models.smollm2()
    copy = shutil.copytree(directory, tmp_path / "copy")
    with serving(twin(tmp_path, directory, copy, 1.0), tmp_path) as served:
        assert complete(served, "one")[0] == 200
        added: list[float] = []
        for name in ("two", "one", "two", "one"):
            start = time.monotonic()
            assert complete(served, name)[0] == 200
            answered = time.monotonic() - start
            rows = map(json.loads, served.log.read_text().splitlines())
            loads = [row["message"] for row in rows if f"serving {name}" in row["message"]]
            added.append(answered - float(loads[-1].rpartition("after ")[2].removesuffix(" s")))
            assert sorted(statuses(served).values()) == ["ready", "unloaded"]
    for number, seconds in enumerate(added):
        record_property(f"load {number}: seconds to answer in addition to loading", seconds)
    assert median(added) < 1, added  # a single one is above it on a busy machine
