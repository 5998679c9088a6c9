"""Replicas of a real server that follow the load; its engines repeat prompts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tests.serving.conftest import Served, serving
from tests.serving.load import LoadReport, ask
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
            """Clients that ask until there are so many replicas."""
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
