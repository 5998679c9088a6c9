"""A worker that dies, hangs or cannot start: its requests fail, and the next one serves."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.conftest import Served, serving
from tests.serving.load import LoadReport, ask

BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 3500, "ignore_eos": True}


def under_load(served: Served, number: int, clients: int = 16) -> list[LoadReport]:
    """Send the worker a signal when all clients are inside, half of them streaming."""

    async def run() -> list[LoadReport]:
        bodies = [{**BODY, "seed": n, "stream": n % 2 == 0} for n in range(clients)]
        asked = [asyncio.create_task(ask(served, body)) for body in bodies]
        while served.metric("vllm:num_requests_running") < clients:
            await asyncio.sleep(0.05)
        os.kill(served.worker, number)
        return await asyncio.gather(*asked)

    return asyncio.run(run())


def test_a_killed_engine(served: Served, record_property: Callable[[str, float], None]) -> None:
    before, worker = served.tokens(), served.worker
    restarts = served.metric("ingot:engine_restarts")
    outcomes = under_load(served, signal.SIGKILL)
    killed = time.monotonic()
    assert all(o.clean for o in outcomes), outcomes
    failed = [o for o in outcomes if o.error]
    assert failed, "it was killed too late to matter"
    assert all(o.error == "service_unavailable_error" for o in failed)
    # All ended together, and that is when the engine died.
    assert max(o.ended for o in outcomes) - min(o.ended for o in failed) < 2
    status, answer, headers = served.call("/v1/completions", BODY)
    assert status == 503, answer
    assert int(headers["retry-after"]) >= 1
    assert served.call("/readyz")[0] == 503
    assert served.call("/healthz")[0] == 200
    served.wait(served.ready, 30)
    back = time.monotonic() - killed
    assert back < 10
    record_property("seconds to serve again after SIGKILL", back)
    assert served.worker != worker
    assert served.tokens() == before
    assert served.quiet()
    assert served.metric("ingot:engine_restarts") == restarts + 1


def test_a_stalled_step(served: Served) -> None:
    before = served.tokens()
    start = time.monotonic()
    outcomes = under_load(served, signal.SIGSTOP, clients=4)
    assert all(o.clean for o in outcomes), outcomes
    assert any(o.error == "service_unavailable_error" for o in outcomes)
    assert time.monotonic() - start < 20
    served.wait(served.ready, 30)
    assert served.tokens() == before
    assert served.quiet()
    assert "no engine step completed for 3 s" in served.log.read_text()


@pytest.mark.slow
def test_a_worker_that_waits_for_work_is_not_stuck(directory: Path, tmp_path: Path) -> None:
    with serving(directory, tmp_path, "--stall-timeout", "0.5") as served:
        worker = served.worker
        for _ in range(3):
            time.sleep(1.5)
            served.tokens()
        assert served.worker == worker
        os.kill(worker, signal.SIGKILL)  # idle: no request waits, and it is restarted all the same
        served.wait(lambda: not served.ready())
        served.wait(served.ready, 30)
        served.tokens()


def test_a_model_that_cannot_be_served_is_said_at_once(directory: Path, tmp_path: Path) -> None:
    """And not tried again."""
    broken = tmp_path / "broken"
    shutil.copytree(directory, broken)
    (broken / "config.json").write_text('{"model_type": "unheard_of"}')
    command = [sys.executable, "-m", "ingot", "serve", str(broken), "--port", "0"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert "unheard_of" in found.stderr
    assert "hint" in found.stderr
    assert "Traceback" not in found.stderr
