"""Helpers for releases of a real server: files, versions, clients."""

from __future__ import annotations

import json
import os
import random
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

from safetensors.torch import load_file, save_file

from tests.serving.conftest import Served, serving

PROMPTS = ["Hello", "Once upon a time", "The capital", "def f(x):", "1, 2, 3", "Dear Sir"]
FAULTY = "tests.serving.faulty"
FILE = '[deployments.chat]\nmodel = "{model}"\nkv_cache_gib = 0.02\n'
CANARY = """
[deployments.chat.canary]
model = "{model}"
share = 0.5
min_seconds = 3
min_requests = 40
max_slowdown = 5
"""
Answer = tuple[str, str, Any]
"""The version, the prompt and the log-probabilities."""


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
    """Clients that ask until `stop`."""

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


def complete(served: Served, **more: Any) -> str:
    body = {"prompt": "Hello", "max_tokens": 2, **more}
    return served.call("/v1/completions", body)[2]["x-model-version"]
