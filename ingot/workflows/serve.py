"""Serve a model, or several, over OpenAI's API.

ingot.serve("smollm2", port=8000)    # until Ctrl-C or SIGTERM

server = build_server("smollm2", port=0)
run(server.run())
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ingot.core.errors import IngotError, UnknownName
from ingot.interop import hub

if TYPE_CHECKING:
    from ingot.serving.server.server import Server


def serve(model: Path | str, *, api_key_file: Path | None = None, **settings: Any) -> None:
    """Serve a model until Ctrl-C or SIGTERM, which finish the running requests first.

    Args:
        model: A model directory, `ORG/NAME` on the Hugging Face hub, or a TOML file of several
            models.
        api_key_file: Lines of names and hashed keys; without it, no key is needed.
        settings: Fields of `ingot.serving.server.config.ServerConfig`: host, port, timeout, ...
    """
    run(build_server(model, api_key_file=api_key_file, **settings).run())


def build_server(model: Path | str, *, api_key_file: Path | None = None, **settings: Any) -> Server:
    """Return a server that listens but has not started to load its model: see `serve`."""
    try:
        from ingot.serving.fleet.deployment import DeploymentSpec
        from ingot.serving.fleet.file import SUFFIX, load_fleet
        from ingot.serving.fleet.fleet import FleetSource, FleetTarget
        from ingot.serving.fleet.rollout import DeploymentTarget
        from ingot.serving.server.config import ServerConfig
        from ingot.serving.server.keys import Keys
        from ingot.serving.server.server import Server
    except ImportError as error:
        raise IngotError(
            f"the server needs the package {error.name}", hint="pip install 'ingot[serve]'"
        ) from error
    fields = ServerConfig.__dataclass_fields__
    if unknown := [name for name in settings if name not in fields]:
        raise UnknownName("setting of the server", unknown[0], fields)
    keys = None if api_key_file is None else Keys.load(api_key_file)
    config = ServerConfig(**settings)
    if Path(model).suffix == SUFFIX and not Path(model).is_dir():
        path = Path(model)
        source = FleetSource(path=path, load=lambda: load_fleet(path, config, hub.model_path))
        return Server(source.load(), config, keys, source)
    directory = hub.model_path(model)
    spec = DeploymentSpec(name=directory.resolve().name, directory=directory, config=config)
    target = FleetTarget(deployments=[DeploymentTarget(spec=spec)], memory_bytes=sys.maxsize)
    return Server(target, config, keys)


def run(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in uvloop if it is installed, or else in asyncio."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)
