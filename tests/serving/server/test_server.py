"""The server as a whole: clients that vanish, do not read or are too many; draining; leaving."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import ConfigError
from ingot.serving.server.server import listen
from tests.serving.conftest import Served, serving
from tests.serving.faulty import POISON
from tests.serving.load import LoadReport, ask

LONG: dict[str, Any] = {"prompt": "Hello", "max_tokens": 3500, "ignore_eos": True, "stream": True}


def vanish(served: Served, clients: int) -> None:
    """Clients leave at all moments: with the first byte, in the middle, before any."""

    async def run() -> None:
        async def leave(n: int) -> None:
            body = {**LONG, "seed": n, "stream": n % 5 != 4, "n": 1 + n % 3}
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ask(served, body, leave_after=(n % 7) * 700), 0.3 + n % 3)

        await asyncio.gather(*[leave(n) for n in range(clients)])

    asyncio.run(run())


def check_after(served: Served, before: Any, seconds: float = 5.0) -> None:
    """Nothing is in use, and the bits are the same."""
    served.wait(served.quiet, seconds)
    assert served.tokens() == before


def test_disconnected_clients_leave_nothing_in_use(served: Served) -> None:
    before = served.tokens()
    vanish(served, 30)
    check_after(served, before)
    assert served.metric("vllm:request_success_total", finished_reason="abort") > 10


@pytest.mark.slow
def test_500_clients_that_vanish(directory: Path, tmp_path: Path) -> None:
    with serving(directory, tmp_path, "--max-requests", "2000") as served:
        before = served.tokens()
        vanish(served, 100)
        served.wait(served.quiet, 30)
        memory = served.metric("process_resident_memory_bytes")
        vanish(served, 500)
        check_after(served, before, 30)
        assert served.metric("process_resident_memory_bytes") < memory + (64 << 20)


@pytest.mark.slow
def test_10000_requests_a_third_of_them_left(directory: Path, tmp_path: Path) -> None:
    """Of mixed lengths, 64 at a time: each ends once, and memory stays as it was."""
    with serving(directory, tmp_path, "--kv-cache-gib", "0.02") as served:
        before = served.tokens()
        done = left = 0

        async def client(numbers: Iterator[int]) -> None:
            nonlocal done, left
            for n in numbers:
                rng = random.Random(n)
                body = {
                    "prompt": [rng.randrange(256) for _ in range(rng.choice((3, 40, 200, 600)))],
                    "max_tokens": rng.choice((1, 5, 30, 120)),
                    "ignore_eos": True,
                    "stream": rng.random() < 0.7,
                    "seed": n,
                }
                leaves = rng.random() < 0.3
                outcome = await ask(served, body, leave_after=0 if leaves else None)
                left += leaves
                assert leaves or (outcome.done and outcome.status == 200), outcome
                done += 1

        async def run(numbers: range) -> None:
            shared = iter(numbers)
            await asyncio.gather(*[client(shared) for _ in range(64)])

        def memory() -> float:
            pages = int(Path(f"/proc/{served.worker}/statm").read_text().split()[1])
            return served.metric("process_resident_memory_bytes") + pages * 4096

        asyncio.run(run(range(2000)))
        served.wait(served.quiet)
        first = memory()
        asyncio.run(run(range(2000, 10_000)))
        served.wait(served.quiet)
        assert (done, served.metric("vllm:request_success_total")) == (10_000, 10_001)
        assert left > 2800
        assert memory() < first + (48 << 20)
        assert served.metric("ingot:engine_restarts") == 0
        assert served.tokens() == before


def test_a_client_gone_gives_its_blocks_back_within_a_step(served: Served) -> None:
    with served.connect(LONG) as connection:
        connection.recv(1000)
        assert served.metric("vllm:num_requests_running") == 1
    assert served.wait(served.quiet) < 1


def test_clients_that_do_not_read_delay_no_other(served: Served) -> None:
    """They are dropped when they have left too much unread; others do not notice."""
    before = served.tokens()
    body = {**LONG, "n": 6, "logprobs": 20, "max_tokens": 1500}
    memory: list[float] = []
    for turn in range(4):
        aborted = served.metric("vllm:request_success_total", finished_reason="abort")
        slow = [
            served.connect({**body, "seed": n}, buffer=4096) for n in range(4 * turn, 4 * turn + 4)
        ]
        try:
            assert served.tokens() == before
            served.wait(lambda: served.metric("ingot:requests_in_flight") == 0, 60)
            now = served.metric("vllm:request_success_total", finished_reason="abort")
            assert now == aborted + 4  # they were not waited for
            memory.append(served.metric("process_resident_memory_bytes"))
        finally:
            for connection in slow:
                connection.close()
    # What they left unread does not accumulate. The first two turns grow the allocator's arenas,
    # by 32 MB at a time.
    assert memory[3] < max(memory[:2]) + (24 << 20)
    check_after(served, before)


def overload(served: Served, clients: int) -> list[LoadReport]:
    body = {"prompt": "Hello", "max_tokens": 200, "temperature": 0, "ignore_eos": True}

    async def run() -> list[LoadReport]:
        return await asyncio.gather(
            *[ask(served, {**body, "stream": n % 2 == 0}) for n in range(clients)]
        )

    return asyncio.run(run())


def test_overload_is_429_and_does_not_affect_running_requests(served: Served) -> None:
    before, shed_before = served.tokens(), served.metric("ingot:requests_rejected")
    alone = overload(served, 1)[0].text
    outcomes = overload(served, 150)
    assert {o.status for o in outcomes} == {200, 429}
    inside = [o for o in outcomes if o.status == 200]
    assert len(inside) >= 40
    assert all(o.done and o.text == alone for o in inside)
    shed = [o for o in outcomes if o.status == 429]
    assert all(1 <= int(o.retry) <= 60 and o.error == "rate_limit_error" for o in shed)
    assert served.metric("ingot:requests_rejected") == shed_before + len(shed)
    check_after(served, before)


def test_a_step_that_fails_fails_its_requests_alone(served: Served) -> None:
    before, failed = served.tokens(), served.metric("ingot:engine_failed_steps_total")
    worker = served.worker
    for stream in (False, True):
        body = {"prompt": [*POISON], "max_tokens": 5, "stream": stream}
        status, answer, _ = served.call("/v1/completions", body)
        assert status == 500
        assert "step" in answer["error"]["message"]
        assert "memory" not in answer["error"]["message"], "details are for the log"
    assert served.metric("ingot:engine_failed_steps_total") == failed + 2
    assert "no memory, for a test" in served.log.read_text()
    assert served.worker == worker
    check_after(served, before)


def test_sigterm_finishes_who_is_inside(directory: Path, tmp_path: Path) -> None:
    with serving(directory, tmp_path, wait=False) as served:
        # While it loads, clients get 503.
        status, answer, headers = served.call("/v1/completions", {"prompt": "a"})
        assert status == 503
        assert "the engine is" in answer["error"]["message"]
        assert headers["retry-after"]
        assert served.call("/healthz")[0] == 200
        served.wait(served.ready, 60)

        async def run() -> LoadReport:
            asked = asyncio.create_task(ask(served, {**LONG, "max_tokens": 1500}))
            while served.metric("vllm:num_requests_running") < 1:
                await asyncio.sleep(0.01)
            served.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            status, answer, headers = await asyncio.to_thread(
                served.call, "/v1/completions", {"prompt": "late"}
            )
            assert status == 503, answer
            assert "shutting down" in answer["error"]["message"]
            assert headers["retry-after"]
            assert served.call("/readyz")[0] == 503
            return await asked

        outcome = asyncio.run(run())
        assert outcome.done
        assert served.process.wait(10) == 0


def test_second_signal_stops_at_once(directory: Path, tmp_path: Path) -> None:
    with serving(directory, tmp_path) as served, served.connect(LONG) as connection:
        connection.recv(1000)
        worker = served.worker
        assert served.call("/drain", b"")[0] == 202
        served.process.send_signal(signal.SIGINT)
        start = time.monotonic()
        assert served.process.wait(10) == 0
        assert time.monotonic() - start < 3
        content = b""
        while data := connection.recv(65536):
            content += data
        assert b"service_unavailable_error" in content, "a clean error"
        assert not Path(f"/proc/{worker}").exists()


def test_a_port_in_use_and_a_wrong_host_have_a_hint() -> None:
    with listen("127.0.0.1", 0, "--port") as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match="in use") as error:
            listen("127.0.0.1", port, "--port")
        assert "another --port" in error.value.hint
    with pytest.raises(ConfigError, match="cannot listen"):
        listen("192.0.2.1", 0, "--host")
    with pytest.raises(ConfigError, match="cannot listen"):
        listen("no.such.host.invalid", 0, "--host")


def test_the_http_process_has_no_torch() -> None:
    modules = "ingot.serving.server.server, ingot.cli.serve, ingot.workflows.serve"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
