"""Releases of a real server: new versions under load, bad canaries, files that are wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.serving.conftest import Served, serving
from tests.serving.server.test_gateway import ECHO

PROMPTS = ["Hello", "Once upon a time", "The capital", "def f(x):", "1, 2, 3", "Dear Sir"]
FAULTY = "tests.serving.faulty"
FILE = '[deployments.chat]\nmodel = "{model}"\nkv_cache_gib = 0.02\n'
CANARY = """
[deployments.chat.canary]
model = "{model}"
share = 0.5
min_seconds = 3
min_requests = 40
"""
Answer = tuple[str, str, Any]
"""The version, the prompt and the log-probabilities."""


@pytest.fixture(scope="module")
def folder(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and versions of it: another one, equal ones, broken ones."""
    folder = tmp_path_factory.mktemp("versions")
    for name in ("v1", "failing", "slow", "broken"):
        shutil.copytree(directory, folder / name)
    (folder / "broken" / "config.json").write_text('{"model_type": "unheard_of"}')
    perturb(folder / "v1", folder / "v2", 0.002)
    perturb(folder / "v1", folder / "drifting", 0.5)
    for name in ("failing", "slow"):  # versions of their own, with the same bits
        (folder / name / "generation_config.json").write_text(f'{{"name": "{name}"}}')
    return folder


def perturb(source: Path, copy: Path, share: float) -> None:
    """Write a copy whose weights are changed by a share of themselves."""
    shutil.copytree(source, copy)
    weights = load_file(copy / "model.safetensors")
    signs = {name: (tensor.double() * 1e4).round() % 2 * 2 - 1 for name, tensor in weights.items()}
    changed = {n: (t.double() * (1 + share * signs[n])).to(t.dtype) for n, t in weights.items()}
    save_file(changed, copy / "model.safetensors", {"format": "pt"})


def write(folder: Path, text: str) -> None:
    (folder / "new").write_text(text)
    os.replace(folder / "new", folder / "fleet.toml")


@contextmanager
def releasing(folder: Path, log: Path, text: str, module: str = "ingot") -> Iterator[Served]:
    write(folder, text)
    with serving(folder / "fleet.toml", log, module=module) as served:
        yield served


def releases(served: Served) -> dict[str, Any]:
    with urllib.request.urlopen(f"{served.admin}/releases", timeout=30) as response:
        return json.loads(response.read())


def chat(served: Served) -> dict[str, Any]:
    return releases(served)["deployments"][0]


def roles(served: Served) -> dict[str, str]:
    """The model of each role."""
    return {one["role"]: one["version"].split("@")[0] for one in chat(served)["versions"]}


def rejected(served: Served) -> dict[str, str]:
    """The reasons by model."""
    return {version.split("@")[0]: why for version, why in chat(served)["rejected"].items()}


def ask(served: Served, prompt: str, user: str = "") -> Answer:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1, "model": "chat"}
    status, found, headers = served.call("/v1/completions", {**body, "user": user})
    assert status == 200, found
    assert found["system_fingerprint"] == headers["x-model-version"]
    return found["system_fingerprint"], prompt, found["choices"][0]["logprobs"]


def ask_all(served: Served) -> dict[tuple[str, str], Any]:
    return {(version, prompt): rest for version, prompt, rest in (ask(served, p) for p in PROMPTS)}


class Load:
    """Clients that ask until they are told to stop."""

    def __init__(self, served: Served, clients: int) -> None:
        self.served, self.answers, self.errors = served, list[Answer](), list[str]()
        self._stop, self._threads = Event(), ThreadPoolExecutor(clients)
        self._clients = [self._threads.submit(self._run, number) for number in range(clients)]

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        while not self._stop.is_set():
            user = f"user{rng.randrange(200)}"
            try:
                self.answers.append(ask(self.served, rng.choice(PROMPTS), user))
            except AssertionError as error:
                self.errors.append(str(error)[:300])

    def until(self, true: Callable[[], bool], seconds: float = 120) -> float:
        return self.served.wait(true, seconds)

    def stop(self) -> list[Answer]:
        self._stop.set()
        for client in self._clients:
            client.result(120)
        self._threads.shutdown()
        return self.answers


def check_release(folder: Path, log: Path, clients: int, num_requests: int, rounds: int) -> None:
    """Replace the model again and again under load; each answer has the bits of its version."""
    with releasing(folder, log, FILE.format(model="v1")) as served:
        expected = ask_all(served)
        load = Load(served, clients)
        for number in range(rounds):
            enough = num_requests * (2 * number + 1) / 2 / rounds
            load.until(lambda enough=enough: len(load.answers) > enough)
            model = ("v2", "v1")[number % 2]
            write(folder, FILE.format(model=model))
            load.until(lambda model=model: roles(served) == {"stable": model})
        load.until(lambda: len(load.answers) > num_requests)
        answers = load.stop()
        assert not load.errors, load.errors[:3]
        if rounds % 2 == 0:
            write(folder, FILE.format(model="v2"))
            served.wait(lambda: roles(served) == {"stable": "v2"}, 60)
        expected |= ask_all(served)
        versions = Counter(version for version, _, _ in answers)
        assert {version.split("@")[0] for version in versions} == {"v1", "v2"}
        assert min(versions.values()) > num_requests / 20, versions
        differing = [one for one in answers if expected[one[:2]] != one[2]]
        assert not differing, differing[0]
        different = {
            json.dumps(rest) for (_, prompt), rest in expected.items() if prompt == "Hello"
        }
        assert len(different) == 2, "the versions differ"
        served.wait(lambda: len(served.workers) == 1)
        page = served.call("/metrics")[1]["text"]
        assert 'version="v1@' not in page, "a version that is gone has no metrics"
        served.wait(served.quiet)


def test_a_model_is_replaced_under_load(folder: Path, tmp_path: Path) -> None:
    check_release(folder, tmp_path, clients=6, num_requests=120, rounds=1)


@pytest.mark.slow
def test_models_are_replaced_under_much_load(folder: Path, tmp_path: Path) -> None:
    check_release(folder, tmp_path, clients=32, num_requests=2000, rounds=4)


def check_canaries(folder: Path, log: Path, bad: dict[str, str], record: Any) -> None:
    """Those that are bad are rolled back for the reason that is given, one after the other; then a
    good one is promoted."""
    stable = FILE.format(model="v1")
    with releasing(folder, log, stable, FAULTY) as served:
        load = Load(served, 8)
        for model, reason in bad.items():
            write(folder, stable + CANARY.format(model=model))
            if model != "broken":
                load.until(lambda: "canary" in chat(served))
            seconds = load.until(lambda model=model: model in rejected(served))
            record(f"seconds until a {model} canary was rolled back", round(seconds, 1))
            assert reason in rejected(served)[model]
            load.until(lambda: roles(served) == {"stable": "v1"})
        loads = served.log.read_text().count("chat: loading")
        text = stable + CANARY.format(model=[*bad][-1])
        write(folder, text + "# the same again\n")
        load.until(lambda: served.log.read_text().count("using the new") > len(bad))
        assert served.log.read_text().count("chat: loading") == loads, "it is not tried again"
        write(folder, stable + CANARY.format(model="v2"))
        load.until(lambda: roles(served) == {"stable": "v2"})
        load.stop()
        assert served.metric("ingot:releases_promoted") == 1
        outcomes = ("ingot:releases_rolled_back", "ingot:releases_failed")
        assert sum(map(served.metric, outcomes)) == len(bad)
        assert all("engine step failed" in error for error in load.errors), load.errors[:3]
        assert {version.split("@")[0] for version, _, _ in load.answers} >= {"v1", "v2"}


def test_a_canary_that_drifts_is_rolled_back_and_a_good_one_is_promoted(
    folder: Path, tmp_path: Path, record_property: Callable[[str, float], None]
) -> None:
    bad = {"drifting": "log-probabilities differ by"}
    check_canaries(folder, tmp_path, bad, record_property)


@pytest.mark.slow
def test_bad_canaries_are_rolled_back(
    folder: Path, tmp_path: Path, record_property: Callable[[str, float], None]
) -> None:
    """Those that fail, are slow or give other log-probabilities; and one that cannot be loaded."""
    bad = {
        "failing": "requests failed",
        "slow": "median",
        "drifting": "log-probabilities differ by",
        "broken": "cannot be loaded",
    }
    check_canaries(folder, tmp_path, bad, record_property)


def test_a_user_stays_on_a_version(folder: Path, tmp_path: Path) -> None:
    text = FILE.format(model="v1") + CANARY.format(model="v2") + "promote = false\nmax_drift = inf"
    with releasing(folder, tmp_path, text, ECHO) as served:
        served.wait(lambda: "canary" in chat(served))
        found = {
            user: {complete(served, user=user) for _ in range(3)} for user in map(str, range(30))
        }
        assert all(len(versions) == 1 for versions in found.values())
        assert 8 <= sum("v2" in next(iter(versions)) for versions in found.values()) <= 22
        assert len({complete(served) for _ in range(30)}) == 2, "requests without a user"
        messages: Any = [{"role": "user", "content": "Hello"}]
        body: dict[str, Any] = {"model": "chat", "messages": messages, "max_tokens": 3}
        for user, versions in found.items():
            more = {**body, "metadata": {"user_id": user}}
            headers = served.call("/v1/messages", more)[2]
            assert headers["x-model-version"] in versions


def complete(served: Served, **more: Any) -> str:
    body = {"prompt": "Hello", "max_tokens": 2, **more}
    return served.call("/v1/completions", body)[2]["x-model-version"]


def test_a_file_is_used_as_a_whole_or_not_at_all(folder: Path, tmp_path: Path) -> None:
    good = FILE.format(model="v1")
    with releasing(folder, tmp_path, good, ECHO) as served:
        more = good.replace("chat", "more").replace("v1", "v2")
        for text, why in (
            (
                more + '[deployments.chat]\nmodel = "missing"\n',
                "model directory not found: missing",
            ),
            (more + good + "memory = 3\n", "did you mean 'memory_gib'"),
            (more + good[:-12], "is not TOML"),
            (
                "memory_gib = 0.6\n" + good + "pinned = true\n" + more + "pinned = true\n",
                "together",
            ),
            ("", "missing deployments"),
        ):
            write(folder, text)
            served.wait(lambda why=why: why in (releases(served)["file_error"] or ""), 30)
            assert [one["name"] for one in releases(served)["deployments"]] == ["chat"]
            assert complete(served).startswith("v1@")
            assert served.metric("ingot:file_error") == 1
        write(folder, good + more)
        served.wait(lambda: len(releases(served)["deployments"]) == 2, 30)
        assert served.metric("ingot:file_error") == 0
        assert complete(served, model="more").startswith("v2@"), "it is loaded on demand"
        write(folder, more)
        served.wait(lambda: [one["name"] for one in releases(served)["deployments"]] == ["more"])
        assert served.call("/v1/completions", {"prompt": "Hello", "model": "chat"})[0] == 404
        served.wait(lambda: len(served.workers) == 1)


def test_limits_change_without_another_engine(folder: Path, tmp_path: Path) -> None:
    with releasing(folder, tmp_path, FILE.format(model="v1"), ECHO) as served:
        complete(served)
        (engine,) = served.workers
        write(folder, FILE.format(model="v1") + "max_requests = 1\n")
        served.wait(lambda: "using the new" in served.log.read_text())
        with ThreadPoolExecutor(8) as threads:
            body = {"prompt": "Hello", "max_tokens": 200}
            found = list(threads.map(lambda _: served.call("/v1/completions", body)[0], range(16)))
        assert {200, 429} == set(found)
        assert served.workers == [engine]


def test_a_model_that_cannot_be_loaded_replaces_nothing(folder: Path, tmp_path: Path) -> None:
    with releasing(folder, tmp_path, FILE.format(model="v1"), ECHO) as served:
        version = complete(served)
        write(folder, FILE.format(model="broken"))
        served.wait(lambda: bool(chat(served)["rejected"]), 60)
        start = time.monotonic()
        while time.monotonic() - start < 2:
            assert complete(served) == version
        assert served.log.read_text().count("chat: loading broken") == 1, "it is not tried again"
        assert roles(served)["stable"] == "v1"
        assert served.metric("ingot:releases_failed") == 1
        write(folder, FILE.format(model="v2"))
        served.wait(lambda: roles(served) == {"stable": "v2"}, 60)
        assert complete(served).startswith("v2@")
