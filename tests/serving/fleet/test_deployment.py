"""The life of a deployment: loading, serving, failing, stopping."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ingot.core.errors import ConfigError, IngotError
from ingot.serving.fleet.deployment import Deployment, DeploymentSpec
from ingot.serving.server.config import ServerConfig
from ingot.serving.workers import supervisor
from ingot.serving.workers.fork_server import ForkServer
from tests.serving.server.test_gateway import ECHO


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    """The fork server that the deployments use, of engines without a model."""
    server = ForkServer()
    monkeypatch.setattr(server, "command", (sys.executable, "-m", ECHO))
    monkeypatch.setattr(supervisor, "fork_server", server)
    yield server
    server.close()


def new(directory: Path, **config: Any) -> tuple[Deployment, list[str]]:
    """Return a deployment, and the states that it will have."""
    spec = DeploymentSpec(name="m", directory=directory, config=ServerConfig(**config))
    deployment, states = Deployment(spec), list[str]()
    deployment.on_change = lambda one: states.append(str(one.state))
    return deployment, states


async def until_ready(deployment: Deployment) -> None:
    async with asyncio.timeout(30):
        while deployment.status != "ready":
            await asyncio.sleep(0.01)


def test_it_is_loaded_and_unloaded_again_and_again(directory: Path) -> None:
    async def run() -> None:
        deployment, states = new(directory, kv_cache_bytes=1 << 20)
        before = deployment.footprint
        assert not deployment.use.is_loaded
        for count in (1, 2):
            states.clear()
            task = deployment.start()
            assert deployment.use.is_loaded, "its memory is counted from now on"
            assert not deployment.use.is_ready
            await until_ready(deployment)
            assert deployment.service is not None
            assert deployment.admission.total.limits.tokens == 8 * 1000 * 32
            deployment.stop("for a test")
            assert deployment.use.is_unloading
            assert deployment.use.is_loaded, "until the process has exited"
            await task
            assert states == ["loading", "ready", "unloading", "unloaded"]
            assert (deployment.num_loads, deployment.engine.restarts) == (count, 0)
            assert deployment.service is None
        assert deployment.footprint == before
        assert deployment.read_metrics().gauges["model_loads"] == 2

    asyncio.run(run())


def test_a_model_that_cannot_be_loaded_has_failed(directory: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(directory, tmp_path / "broken")

    async def run() -> None:
        deployment, states = new(broken)
        (broken / "config.json").write_text('{"model_type": "unheard_of"}')
        for _ in range(2):
            states.clear()
            with pytest.raises(IngotError, match="unheard_of"):
                await deployment.start()
            assert states == ["loading", "failed"]
            assert deployment.error is not None
            assert not deployment.use.is_loaded
        shutil.copy(directory / "config.json", broken)
        task = deployment.start()
        await until_ready(deployment)
        assert deployment.error is None
        (broken / "config.json").write_text('{"model_type": "unheard_of"}')
        deployment.stop("for a test")
        await task
        with pytest.raises(IngotError, match="unheard_of"):  # also after a successful load
            await deployment.start()
        (broken / "tokenizer.json").unlink()
        with pytest.raises(IngotError, match="tokenizer"):
            await deployment.start()

    asyncio.run(run())


def test_it_can_be_stopped_while_it_loads(directory: Path) -> None:
    async def run() -> None:
        for delay in (0.0, 0.1):
            deployment, states = new(directory)
            task = deployment.start()
            await asyncio.sleep(delay)
            deployment.stop("for a test")
            await asyncio.wait_for(task, 10)
            assert states[-2:] == ["unloading", "unloaded"]

    asyncio.run(run())


def test_what_cannot_be_started_is_an_error_with_its_cause(
    directory: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "command", ("/nowhere/python",))

    async def run() -> None:
        deployment, states = new(directory)
        with pytest.raises(FileNotFoundError):
            await deployment.start()
        assert states == ["loading", "failed"]
        assert deployment.error is not None
        assert "/nowhere/python" in deployment.error.message

    asyncio.run(run())


def test_an_adapter_may_not_have_the_name_of_the_model(directory: Path) -> None:
    config = ServerConfig(adapters={"m": "x"})
    with pytest.raises(ConfigError, match="name of its base model"):
        DeploymentSpec(name="m", directory=directory, config=config)
