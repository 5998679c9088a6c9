"""The file of a running server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.serving.releases import (
    FILE,
    complete,
    releases,
    releasing,
    write,
)
from tests.serving.server.test_gateway import ECHO


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
