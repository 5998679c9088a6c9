"""New versions of a real server, under load."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.serving.releases import (
    CANARY,
    FILE,
    Load,
    ask_all,
    chat,
    complete,
    releasing,
    roles,
    write,
)
from tests.serving.server.test_gateway import ECHO


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
            enough = len(load.answers) + num_requests / 10  # of the new version
            load.until(lambda enough=enough: len(load.answers) > enough)
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


def test_a_user_stays_on_a_version(folder: Path, tmp_path: Path) -> None:
    text = FILE.format(model="v1") + CANARY.format(model="v2") + "promote = false\nmax_drift = inf"
    with releasing(folder, tmp_path, text, ECHO) as served:
        served.wait(lambda: "canary" in chat(served))
        found = {
            user: {complete(served, user=user) for _ in range(3)} for user in map(str, range(30))
        }
        assert all(len(versions) == 1 for versions in found.values())
        assert 5 <= sum("v2" in next(iter(versions)) for versions in found.values()) <= 25
        assert len({complete(served) for _ in range(30)}) == 2, "requests without a user"
        messages: Any = [{"role": "user", "content": "Hello"}]
        body: dict[str, Any] = {"model": "chat", "messages": messages, "max_tokens": 3}
        for user, versions in found.items():
            more = {**body, "metadata": {"user_id": user}}
            headers = served.call("/v1/messages", more)[2]
            assert headers["x-model-version"] in versions


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
