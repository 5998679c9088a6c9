"""Replicas of a real server that follow the load; its engines repeat prompts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from ingot.serving.engine.request import FinishReason
from ingot.serving.workers.replicas import ReplicaSet
from ingot.serving.workers.supervisor import Supervisor
from tests.serving.conftest import Served, serving
from tests.serving.load import LoadReport, ask
from tests.serving.scripted import ScriptedWorker, expected, run, submit
from tests.serving.server.test_gateway import ECHO

FILE = """
[deployments.chat]
model = "{model}"
kv_cache_gib = 0.02
autoscale = {{ min = 1, max = 3, cooldown = 3 }}
"""


def replicas(served: Served) -> tuple[float, float]:
    """The replicas that are wanted, and those that accept requests."""
    return served.metric("ingot:replicas"), served.metric("ingot:engine_up")


def test_replicas_follow_the_load_and_lose_no_request(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FILE.format(model=directory))
    body: dict[str, Any] = {"prompt": "Hello", "max_tokens": 100, "stream": True}
    found: list[LoadReport] = []
    with serving(tmp_path / "fleet.toml", tmp_path, module=ECHO) as served:

        async def clients(count: int, wanted: int, seconds: float) -> None:
            """Clients that ask until there are `wanted` replicas."""
            over = asyncio.Event()

            async def client() -> None:
                while not over.is_set():
                    found.append(await ask(served, body))

            async def wait() -> None:
                try:
                    await asyncio.to_thread(
                        served.wait, lambda: replicas(served) == (wanted, wanted), seconds
                    )
                finally:
                    over.set()

            await asyncio.gather(wait(), *[client() for _ in range(count)])

        assert replicas(served) == (1, 1)
        asyncio.run(clients(24, 3, 120))
        asyncio.run(clients(1, 1, 120))
        served.wait(lambda: len(served.workers) == 1)
        assert len(found) > 30
        assert {(one.status, one.done, one.text[:5]) for one in found} == {(200, True, "Hello")}
        assert served.metric("ingot:request_retries") == 0
        assert "replicas instead of" in served.log.read_text()
        served.wait(served.quiet)


def test_a_drained_replica_finishes_its_requests_and_gets_no_others() -> None:
    async def test(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        for worker in workers:
            await worker.connect()
        answers = [submit(replicas) for _ in range(6)]
        replicas.resize(1)
        assert (replicas.num_replicas, replicas.num_ready) == (1, 1)
        answers += [submit(replicas) for _ in range(4)]
        for worker in workers:
            await worker.read()
        first, last = workers if replicas.supervisors[0] in running(replicas) else workers[::-1]
        assert (len(first.requests), len(last.requests)) == (7, 3)
        assert not any(one.is_stopping for one in replicas.supervisors.values())
        for _ in range(5):
            await last.step()
        assert last.engine.ready, "its requests are not finished"
        await last.step()
        assert not last.engine.ready, "it is stopped"
        for _ in range(6):
            await first.step()
        for answer in answers:
            assert answer.tokens == expected(answer.request)
            assert answer.ends == [FinishReason.LENGTH]
        assert replicas.num_retries == 0

    run(test)


def running(replicas: ReplicaSet) -> list[Supervisor]:
    drained = replicas._draining  # pyright: ignore[reportPrivateUsage]
    return [one for index, one in replicas.supervisors.items() if index not in drained]


def test_a_drained_replica_that_dies_is_not_started_again_and_one_may_return() -> None:
    async def test(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        for worker in workers:
            await worker.connect()
        answers = [submit(replicas) for _ in range(6)]
        replicas.resize(1)
        replicas.resize(2)
        assert replicas.num_ready == 2, "it was not stopped yet"
        replicas.resize(1)
        drained = next(i for i in (0, 1) if replicas.supervisors[i] not in running(replicas))
        await workers[drained].step()
        await workers[drained].die()
        await asyncio.sleep(0.01)
        assert replicas.supervisors[drained].is_stopping
        for _ in range(6):
            await workers[1 - drained].step()
        for answer in answers:
            assert answer.tokens == expected(answer.request)
        replicas.resize(2)
        assert replicas.num_replicas == 1, "its place is free when it has exited"

    run(test)


def test_the_load_is_how_long_requests_wait() -> None:
    async def test(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        (worker,) = workers
        await worker.connect()
        now = asyncio.get_running_loop().time()
        submit(replicas)
        await worker.step()
        sample = replicas.sample_load(now + 9)
        assert (sample.num_replicas, sample.kv_use) == (1, 1.0), "as STATS say"
        assert sample.queue_delay_s < 1
        submit(replicas)
        await worker.read()
        assert replicas.sample_load(now + 9).queue_delay_s > 7, "it still waits"
        await worker.step()
        assert replicas.sample_load(now + 9).queue_delay_s < 1
        await worker.die()

    run(test, num_replicas=1)
