"""The server: two listeners, the deployments of its models, startup and shutdown.

    main     for clients: OpenAI's API, a page, /healthz, /readyz
    admin    for operators: /metrics, /drain, loading of adapters; on loopback by default

Both sockets are bound before a model is loaded, so that a port in use is reported at once. While
a single model loads, requests are answered with 503. SIGTERM or Ctrl-C drains the server: no new
requests are accepted, running ones have `drain_timeout` seconds to finish; a second signal stops it
immediately.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable, Generator
from typing import Any

import uvicorn

from ingot.core.errors import ConfigError, IngotError
from ingot.core.log import logger
from ingot.serving.fleet.deployment import Deployment, DeploymentState
from ingot.serving.fleet.fleet import Fleet, FleetSource, FleetTarget
from ingot.serving.server.app import create_admin_app, create_app
from ingot.serving.server.config import ServerConfig
from ingot.serving.server.gateway import Gateway
from ingot.serving.server.keys import Keys
from ingot.serving.server.metrics import EngineCollector, ServerMetrics
from ingot.serving.server.protocol import LimitedHttpProtocol
from ingot.serving.server.tracing import start_tracing
from ingot.serving.workers.fork_server import fork_server

_log = logger(__name__)
MAX_CONNECTIONS = 4096
UNACKNOWLEDGED_MS = 60_000
"""Milliseconds after which the system drops a client that acknowledges nothing."""


def listen(host: str, port: int, option: str) -> socket.socket:
    """Return a listening socket; `option` is the CLI option named in errors."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise _listen_error(host, port, option, error) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise _listen_error(host, port, option, error) from error
    return listener


def _listen_error(host: str, port: int, option: str, error: OSError) -> IngotError:
    if error.errno == errno.EADDRINUSE:
        hint = f"stop the process (ss -ltnp 'sport = :{port}' shows it), or choose another {option}"
        return ConfigError(f"port {port} of {host} is in use", hint=hint)
    if error.errno == errno.EACCES:
        message = f"permission denied for port {port} (ports below 1024 need privileges)"
        return ConfigError(message, hint=f"choose {option} from 1024 on")
    hint = "use an address of this machine: 127.0.0.1 for local clients, 0.0.0.0 for all"
    return ConfigError(f"cannot listen at {host}:{port}: {error.strerror}", hint=hint)


class _Uvicorn(uvicorn.Server):
    """A uvicorn server without signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _uvicorn(app: Any) -> _Uvicorn:
    return _Uvicorn(
        uvicorn.Config(
            app,
            http=LimitedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
            limit_concurrency=MAX_CONNECTIONS,
        )
    )


class Server:
    """Serves models."""

    def __init__(
        self,
        target: FleetTarget,
        config: ServerConfig,
        keys: Keys | None = None,
        source: FleetSource | None = None,
    ) -> None:
        """Listen; `source` is the file that the deployments come from, which is followed."""
        self.config = config
        self.fleet = Fleet(target, source)
        self.gateway = Gateway(self.fleet, keys)
        self._main = listen(config.host, config.port, "--port")
        self._admin = listen(config.admin_host, config.admin_port, "--admin-address")
        _raise_file_limit()
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        if self.fleet.is_single:
            self.gateway.deployments[0].prepare()
        self.on_ready: Callable[[Deployment], None] = lambda _: None
        """Called when a worker has loaded a model."""
        self.fleet.pool.on_change = self._on_change
        self._draining = asyncio.Event()
        self._stop_now = asyncio.Event()

    @property
    def address(self) -> str:
        """URL for clients."""
        return _url(self._main)

    @property
    def admin_address(self) -> str:
        """URL for operators."""
        return _url(self._admin)

    @property
    def is_public(self) -> bool:
        """Whether other machines may reach it."""
        return not ipaddress.ip_address(self._main.getsockname()[0]).is_loopback

    async def run(self) -> None:
        """Serve until drained; raise the error of a model that cannot be loaded."""
        app = create_app(self.gateway)
        traced = start_tracing(app)
        main = _uvicorn(traced or app)
        collector = EngineCollector(self._read_metrics)
        admin = _uvicorn(create_admin_app(self.gateway, collector, self.drain))
        self._handle_signals()
        serving = asyncio.create_task(self.fleet.run())
        listening = [
            asyncio.create_task(main.serve([self._main])),
            asyncio.create_task(admin.serve([self._admin])),
        ]
        draining = asyncio.create_task(self._drain())
        await asyncio.wait((serving, draining), return_when=asyncio.FIRST_COMPLETED)
        stopping = asyncio.create_task(self.fleet.pool.stop())
        main.should_exit = admin.should_exit = True
        await asyncio.gather(*listening, stopping)
        fork_server.close()
        if traced is not None:
            traced.shutdown()
        draining.cancel()
        await serving

    def _handle_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.drain)

    def drain(self) -> None:
        """Finish running requests, then stop; stop at once if called again."""
        if self._draining.is_set():
            self._stop_now.set()
        self.gateway.draining = True
        self._draining.set()

    async def _drain(self) -> None:
        await self._draining.wait()
        in_flight = self.gateway.num_requests
        if in_flight:
            _log.info("finishing %d requests; send the signal again to stop now", in_flight)
        deadline = time.monotonic() + self.config.drain_timeout
        while self.gateway.num_requests and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_now.wait(), 0.05)
            if self._stop_now.is_set():
                break

    def _on_change(self, deployment: Deployment) -> None:
        if deployment.state is DeploymentState.READY:
            self._handle_signals()  # Ray has replaced the handlers when it started
            self.on_ready(deployment)

    def _read_metrics(self) -> ServerMetrics:
        gateway = self.gateway
        gauges = {
            "draining": float(gateway.draining),
            "memory_reserved_bytes": gateway.pool.used_bytes,
            "file_error": float(self.fleet.file_error is not None),
        }
        models = self.fleet.read_metrics()
        return ServerMetrics(models, gateway.statuses, gauges)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _raise_file_limit() -> None:
    """Allow as many open files as connections; the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * MAX_CONNECTIONS
    if hard != resource.RLIM_INFINITY:
        wanted = min(hard, wanted)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
