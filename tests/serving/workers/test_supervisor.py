"""A worker that dies, hangs or cannot start: its requests continue on the next one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ingot.serving.workers import supervisor, wire
from ingot.serving.workers.engine_client import EngineClient
from ingot.serving.workers.worker import WorkerSettings
from tests.serving.conftest import Served, serving
from tests.serving.load import LoadReport, ask
from tests.serving.server.messages import READY

BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 600, "ignore_eos": True}


def under_load(
    served: Served, number: int, clients: int = 16, after: Callable[[], None] = lambda: None
) -> list[LoadReport]:
    """Send the worker a signal when all clients are inside, half of them streaming."""

    async def run() -> list[LoadReport]:
        bodies = [{**BODY, "seed": n, "stream": n % 2 == 0} for n in range(clients)]
        asked = [asyncio.create_task(ask(served, body)) for body in bodies]
        while served.metric("vllm:num_requests_running") < clients:
            await asyncio.sleep(0.02)
        os.kill(served.worker, number)
        await asyncio.to_thread(after)
        return await asyncio.gather(*asked)

    return asyncio.run(run())


def check_undisturbed(served: Served, outcomes: list[LoadReport]) -> None:
    """Every client has the whole text that it gets without a signal."""
    assert all(o.done and not o.error for o in outcomes), outcomes
    again = under_load(served, 0, len(outcomes))
    assert [o.text for o in outcomes] == [o.text for o in again]


def test_a_killed_engine(served: Served, record_property: Callable[[str, float], None]) -> None:
    before, worker = served.tokens(), served.worker
    restarts, retries = (
        served.metric(f"ingot:{name}") for name in ("engine_restarts", "request_retries")
    )

    def check_away() -> None:
        served.wait(lambda: not served.ready())
        status, answer, headers = served.call("/v1/completions", BODY)
        assert status == 503, answer
        assert int(headers["retry-after"]) >= 1
        assert served.call("/healthz")[0] == 200
        record_property("seconds to serve again after SIGKILL", served.wait(served.ready, 30))

    outcomes = under_load(served, signal.SIGKILL, after=check_away)
    assert served.worker != worker
    assert served.metric("ingot:engine_restarts") == restarts + 1
    assert served.metric("ingot:request_retries") == retries + 16
    check_undisturbed(served, outcomes)
    assert served.tokens() == before
    served.wait(served.quiet)


def test_a_stalled_step(served: Served) -> None:
    before = served.tokens()
    start = time.monotonic()
    outcomes = under_load(served, signal.SIGSTOP, clients=4)
    assert time.monotonic() - start < 30
    check_undisturbed(served, outcomes)
    assert served.tokens() == before
    served.wait(served.quiet)
    assert "no engine step completed for 3 s" in served.log.read_text()


class _Scripted:
    """A worker process that has loaded its model, and dies."""

    def __init__(self) -> None:
        self.connection, self._socket = socket.socketpair()
        self._socket.sendall(wire.frame(READY))
        asyncio.get_running_loop().call_later(0.02, self._socket.close)

    def poll(self) -> int | None:
        return None if self._socket.fileno() >= 0 else -9

    def kill(self) -> None:
        self._socket.close()


@pytest.mark.parametrize(("steady_s", "failures"), [(1e9, [1, 2, 3, 4]), (0.0, [1, 1, 1, 1])])
def test_only_a_worker_that_dies_soon_is_restarted_later(
    monkeypatch: pytest.MonkeyPatch, steady_s: float, failures: list[int]
) -> None:
    """One that has served for a while is restarted at once, however often it dies."""
    monkeypatch.setattr(supervisor, "STEADY_S", steady_s)
    counted: list[int] = []

    def restart_delay(number: int) -> float:
        counted.append(number)
        return 0.0

    async def launch(settings: str) -> tuple[socket.socket, _Scripted]:
        worker = _Scripted()
        return worker.connection, worker

    async def run() -> None:
        one = supervisor.Supervisor(EngineClient(), WorkerSettings(directory="m"), 60.0, launch)
        running = asyncio.create_task(one.run())
        while len(counted) < len(failures):
            await asyncio.sleep(0.01)
        one.stop("over")
        await asyncio.wait_for(running, 20)

    monkeypatch.setattr(supervisor, "restart_delay", restart_delay)
    asyncio.run(run())
    assert counted[: len(failures)] == failures


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
