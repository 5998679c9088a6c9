"""`ingot.serve`: settings are checked, and the server answers."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

import ingot
from ingot.core.errors import IngotError, UnknownName
from ingot.serving.fleet.deployment import Deployment
from ingot.workflows.serve import build_server, run
from tests import models


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.small(tmp_path_factory.mktemp("model") / "small")


def test_an_unknown_setting_names_the_nearest(directory: Path) -> None:
    with pytest.raises(UnknownName, match="did you mean 'port'"):
        ingot.serve(directory, prot=1)


def test_a_missing_model_is_an_error_before_anything_listens(tmp_path: Path) -> None:
    with pytest.raises(IngotError, match="not found"):
        ingot.serve(tmp_path / "missing")


def test_the_server_loads_its_model_and_stops(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        admin = probe.getsockname()[1]
    server = build_server(directory, port=0, admin_port=admin)
    started: list[bool] = []

    def stop(deployment: Deployment) -> None:
        started.append(deployment.engine.ready)
        server.drain()

    server.on_ready = stop
    run(asyncio.wait_for(server.run(), 300))
    assert started == [True]
