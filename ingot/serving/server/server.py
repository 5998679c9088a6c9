"""The server: two listeners, the supervisor of the engine process, startup and shutdown.

    main     for clients: OpenAI's API, /healthz, /readyz
    admin    for operators: /metrics, /drain, loading of adapters; on loopback by default

Both sockets are bound before the model is loaded, so that a port in use is reported at once. While
the model loads, requests are answered with 503. SIGTERM or Ctrl-C drains the server: no new
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
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import uvicorn

from ingot.core.config import check_bounds
from ingot.core.errors import ConfigError, IngotError
from ingot.core.log import logger
from ingot.interop.signature import is_classifier
from ingot.interop.tokenizer import Tokenizer
from ingot.serving.engine.adapters import check_name
from ingot.serving.engine.batcher import BatchingConfig
from ingot.serving.server.admission import Admission, AdmissionLimits
from ingot.serving.server.app import create_admin_app, create_app
from ingot.serving.server.engine_client import EngineClient
from ingot.serving.server.keys import Keys
from ingot.serving.server.metrics import EngineCollector
from ingot.serving.server.protocol import LimitedHttpProtocol
from ingot.serving.server.service import Service
from ingot.serving.server.supervisor import Supervisor
from ingot.serving.server.worker import WorkerSettings

_log = logger(__name__)
MAX_CONNECTIONS = 4096
QUEUE_DEPTH_FACTOR = 8
"""Maximum tokens in flight, as a multiple of the KV cache's capacity."""
UNACKNOWLEDGED_MS = 60_000
"""Milliseconds after which the system drops a client that acknowledges nothing."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the server.

    >>> ServerConfig().port
    8000
    """

    host: str = "127.0.0.1"
    port: int = 8000
    """0 for any free port."""
    admin_host: str = "127.0.0.1"
    admin_port: int = 9000
    device: str = "auto"
    """Device of the engine: "auto", "cpu", "cuda:0"..."""
    max_requests: int = 256
    """Maximum concurrent requests; further ones are rejected with 429."""
    timeout: float = 600.0
    """Seconds after which a request fails."""
    stall_timeout: float = 60.0
    """Seconds without a completed step, with requests outstanding, until the engine restarts."""
    drain_timeout: float = 30.0
    """Seconds that running requests have to finish at shutdown."""
    kv_cache_bytes: int | None = None
    kv_cache_dtype: Literal["auto", "int8"] = "auto"
    """Dtype of cached keys and values; "auto" is that of the model."""
    speculate: Literal["ngram", "int4"] | None = None
    adapters: Mapping[str, Path | str] = field(default_factory=dict[str, "Path | str"])
    """Directories of LoRA adapters by the name that requests give as their `model`."""
    max_loras: int | None = None
    """Maximum number of loaded adapters; by default that of `adapters`."""
    max_lora_rank: int | None = None
    """Maximum rank; by default the largest of `adapters`, at least 16."""
    max_batch_size: int = BatchingConfig.max_batch_size
    """Maximum number of rows of a batch of a classifier."""
    max_queue_delay: float = BatchingConfig.max_queue_delay
    """Seconds that a request to a classifier may wait for others."""
    json_logs: bool = False

    def __post_init__(self) -> None:
        check_bounds(
            self,
            port=(0, 65535),
            admin_port=(0, 65535),
            max_requests=(1, 100_000),
            timeout=(0.1, 86_400),
            stall_timeout=(0.1, 86_400),
            drain_timeout=(0.0, 86_400),
        )
        BatchingConfig(max_batch_size=self.max_batch_size, max_queue_delay=self.max_queue_delay)
        if self.max_queue_delay >= self.stall_timeout:
            raise ConfigError(
                "max_queue_delay: must be below stall_timeout, which restarts the engine",
                hint="lower --max-queue-delay-ms",
            )


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
    """Serves the model in a directory."""

    def __init__(self, directory: Path, config: ServerConfig, keys: Keys | None = None) -> None:
        self.config = config
        self._main = listen(config.host, config.port, "--port")
        self._admin = listen(config.admin_host, config.admin_port, "--admin-address")
        _raise_file_limit()
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self.engine = EngineClient()
        self.admission = Admission(AdmissionLimits(requests=config.max_requests))
        settings = WorkerSettings(
            directory=str(directory),
            device=config.device,
            kv_cache_bytes=config.kv_cache_bytes,
            kv_cache_dtype=config.kv_cache_dtype,
            speculate=config.speculate,
            adapters=_check_adapters(config.adapters, directory.resolve().name),
            max_loras=config.max_loras,
            max_lora_rank=config.max_lora_rank,
            max_batch_size=config.max_batch_size,
            max_queue_delay=config.max_queue_delay,
            json_logs=config.json_logs,
        )
        self.supervisor = Supervisor(self.engine, settings, config.stall_timeout)
        self.service = Service(
            model=directory.resolve().name,
            tokenizer=_load_tokenizer(directory),
            engine=self.engine,
            admission=self.admission,
            keys=keys,
            max_request_s=config.timeout,
            stalled=lambda: self.supervisor.stalled,
        )
        self.on_ready: Callable[[], None] = lambda: None
        """Called when a worker has loaded the model."""
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
        collector = EngineCollector(
            self.service.metrics,
            self.service.model,
            lambda: (self.engine.info, self.engine.stats),
            self._gauges,
        )
        main = _uvicorn(create_app(self.service))
        admin = _uvicorn(create_admin_app(self.service, collector, self.drain))
        self.engine.on_status_change = self._on_status_change
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.drain)
        supervising = asyncio.create_task(self.supervisor.run())
        listening = [
            asyncio.create_task(main.serve([self._main])),
            asyncio.create_task(admin.serve([self._admin])),
        ]
        draining = asyncio.create_task(self._drain())
        await asyncio.wait((supervising, draining), return_when=asyncio.FIRST_COMPLETED)
        self.supervisor.stop("the server is stopping")
        main.should_exit = admin.should_exit = True
        await asyncio.gather(*listening)
        draining.cancel()
        await supervising

    def drain(self) -> None:
        """Finish running requests, then stop; stop at once if called again."""
        if self._draining.is_set():
            self._stop_now.set()
        self.service.draining = True
        self._draining.set()

    async def _drain(self) -> None:
        await self._draining.wait()
        in_flight = self.admission.requests
        if in_flight:
            _log.info("finishing %d requests; send the signal again to stop now", in_flight)
        deadline = time.monotonic() + self.config.drain_timeout
        while self.admission.requests and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_now.wait(), 0.05)
            if self._stop_now.is_set():
                break

    def _on_status_change(self) -> None:
        info = self.engine.info
        if self.engine.ready and info is not None:
            limits = AdmissionLimits(requests=self.config.max_requests)
            if info.num_blocks:
                tokens = QUEUE_DEPTH_FACTOR * info.num_blocks * info.block_size
                limits = replace(limits, tokens=tokens)
            self.admission.limits = limits
            self.on_ready()

    def _gauges(self) -> dict[str, float]:
        return {
            "requests_in_flight": self.admission.requests,
            "tokens_in_flight": self.admission.tokens,
            "requests_rejected": self.admission.num_rejected,
            "engine_up": float(self.engine.ready),
            "engine_restarts": self.supervisor.restarts,
            "draining": float(self.service.draining),
        }


def _load_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.empty() if is_classifier(directory) else Tokenizer.load(directory)


def _check_adapters(adapters: Mapping[str, Path | str], model: str) -> dict[str, str]:
    for name in adapters:
        check_name(name)
        if name == model:
            raise ConfigError(
                f"adapter '{name}' has the name of its base model", hint="give it another name"
            )
    return {name: str(Path(path).absolute()) for name, path in adapters.items()}


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
