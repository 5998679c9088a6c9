"""The server as a whole: two listeners, the supervisor of the engine, and how it all ends.

    main      what clients use: OpenAI's API, /healthz, /readyz
    control   what operators use: /metrics, /drain; on loopback unless told otherwise

Both sockets are bound before the model is loaded, so a port in use is known at once. While it
loads, requests are answered by 503. SIGTERM or Ctrl-C drains: no new requests, those inside are
finished for up to `grace` seconds, then all leave; a second signal does not wait.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from ingot.core.errors import ConfigError, IngotError
from ingot.core.log import logger
from ingot.interop.tokenizer import Tokenizer
from ingot.serving.server import http
from ingot.serving.server.admission import Admission, Bounds
from ingot.serving.server.engine_client import Front
from ingot.serving.server.keys import Keys
from ingot.serving.server.metrics import Facts
from ingot.serving.server.protocol import Bounded
from ingot.serving.server.supervisor import Supervisor
from ingot.serving.server.worker import Settings

_log = logger(__name__)
CONNECTIONS = 4096
TURNS = 8
"""Tokens inside at a time, as a multiple of what the KV cache holds."""
UNACKNOWLEDGED = 60_000
"""Milliseconds after which the system drops a client that reads nothing of what was sent."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """How to serve.

    >>> Config().port
    8000
    """

    host: str = "127.0.0.1"
    port: int = 8000
    """0 for any that is free."""
    control_host: str = "127.0.0.1"
    control_port: int = 9000
    requests: int = 256
    """Inside at a time; beyond, they are shed."""
    timeout: float = 600.0
    """Seconds after which an answer is worth nothing."""
    stall: float = 60.0
    """Seconds without a step, with work outstanding, after which the engine is restarted."""
    grace: float = 30.0
    """Seconds that requests inside have to finish when the server is told to stop."""
    memory: int | None = None
    """Bytes for keys and values."""
    lookup: bool = False
    """Whether to speculate by lookup."""
    json: bool = False
    """Whether logs are JSON."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("control_port", 0, 65535),
            ("requests", 1, 100_000),
            ("timeout", 0.1, 86_400),
            ("stall", 0.1, 86_400),
            ("grace", 0.0, 86_400),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}", hint=f"give a number from {low} to {high}"
                )


def listen(host: str, port: int, option: str) -> socket.socket:
    """A socket that listens there; `option` is what the user would change."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise _no_socket(host, port, option, error) from error
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED)
        made.bind(address)
        made.listen(2048)
    except OSError as error:
        made.close()
        raise _no_socket(host, port, option, error) from error
    return made


def _no_socket(host: str, port: int, option: str, error: OSError) -> IngotError:
    if error.errno == errno.EADDRINUSE:
        hint = f"stop what uses it (ss -ltnp 'sport = :{port}' tells), or give another {option}"
        return ConfigError(f"port {port} of {host} is in use", hint=hint)
    if error.errno == errno.EACCES:
        hint = f"give {option} a number from 1024 on"
        return ConfigError(f"port {port} is not for everybody", hint=hint)
    hint = "name an address of this machine: 127.0.0.1 for itself, 0.0.0.0 for everybody"
    return ConfigError(f"cannot listen at {host}:{port}: {error.strerror}", hint=hint)


class _Uvicorn(uvicorn.Server):
    """One that leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _uvicorn(app: Any) -> _Uvicorn:
    return _Uvicorn(
        uvicorn.Config(
            app,
            http=Bounded,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=5,
            limit_concurrency=CONNECTIONS,
        )
    )


class Server:
    """A model directory that is served."""

    def __init__(self, directory: Path, config: Config, keys: Keys | None = None) -> None:
        self.config = config
        self._main = listen(config.host, config.port, "--port")
        self._control = listen(config.control_host, config.control_port, "--admin-address")
        _raise_files()
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self.front = Front()
        self.admission = Admission(Bounds(requests=config.requests))
        settings = Settings(
            directory=str(directory),
            memory=config.memory,
            lookup=config.lookup,
            json=config.json,
        )
        self.supervisor = Supervisor(self.front, settings, config.stall)
        self.service = http.Service(
            model=directory.resolve().name,
            tokenizer=Tokenizer.load(directory),
            front=self.front,
            admission=self.admission,
            keys=keys,
            seconds=config.timeout,
            stuck=lambda: self.supervisor.stuck,
        )
        self.started: Callable[[], None] = lambda: None
        """Called when the model is loaded for the first time."""
        self._leaving = asyncio.Event()
        self._stopped = asyncio.Event()

    @property
    def address(self) -> str:
        """Where clients find it."""
        return _url(self._main)

    @property
    def control_address(self) -> str:
        """Where operators find it."""
        return _url(self._control)

    @property
    def exposed(self) -> bool:
        """Whether other machines may reach it."""
        return not ipaddress.ip_address(self._main.getsockname()[0]).is_loopback

    async def run(self) -> None:
        """Serve until told to stop; raises what is wrong with the model."""
        facts = Facts(
            self.service.metrics,
            self.service.model,
            lambda: (self.front.hello, self.front.stats),
            self._gauges,
        )
        main = _uvicorn(http.app(self.service))
        control = _uvicorn(http.control(self.service, facts, self.leave))
        self.front.changed = self._changed
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.leave)
        supervising = asyncio.create_task(self.supervisor.run())
        listening = [
            asyncio.create_task(main.serve([self._main])),
            asyncio.create_task(control.serve([self._control])),
        ]
        leaving = asyncio.create_task(self._drain())
        await asyncio.wait((supervising, leaving), return_when=asyncio.FIRST_COMPLETED)
        self.supervisor.stop("the server is stopping")
        main.should_exit = control.should_exit = True
        await asyncio.gather(*listening)
        leaving.cancel()
        await supervising

    def leave(self) -> None:
        """Drain, then stop; told again, stop."""
        if self._leaving.is_set():
            self._stopped.set()
        self.service.draining = True
        self._leaving.set()

    async def _drain(self) -> None:
        await self._leaving.wait()
        inside = self.admission.requests
        if inside:
            _log.info("finishing %d requests; once more to stop now", inside)
        deadline = time.monotonic() + self.config.grace
        while self.admission.requests and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopped.wait(), 0.05)
            if self._stopped.is_set():
                break

    def _changed(self) -> None:
        hello = self.front.hello
        if self.front.ready and hello is not None:
            tokens = TURNS * hello.blocks * hello.block_size
            self.admission.bounds = Bounds(requests=self.config.requests, tokens=tokens)
            self.started()

    def _gauges(self) -> dict[str, float]:
        return {
            "requests_inside": self.admission.requests,
            "tokens_inside": self.admission.tokens,
            "requests_shed": self.admission.shed,
            "engine_up": float(self.front.ready),
            "engine_restarts": self.supervisor.restarts,
            "draining": float(self.service.draining),
        }


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _raise_files() -> None:
    """A connection is an open file, and the usual bound is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, 2 * CONNECTIONS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
