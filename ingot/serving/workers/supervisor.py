"""Keeps an engine process running.

A worker is dead when its socket closes, and stalled when requests are outstanding and no step has
completed for `stall_timeout` seconds: then it is killed. Either way its requests are handed over
(`EngineClient.on_lost`), and the next worker starts: the first time immediately, then after 1, 2,
4... seconds, at most 30, until one has served for `STEADY_S` seconds. If the first worker reports
why it cannot load the model, it is not restarted: `Supervisor.run` raises the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias

import msgspec

from ingot.core.errors import IngotError
from ingot.core.log import logger
from ingot.serving.workers.engine_client import EngineClient
from ingot.serving.workers.fork_server import fork_server
from ingot.serving.workers.worker import WorkerSettings

_log = logger(__name__)
MAX_RESTART_DELAY_S = 30.0
STEADY_S = 10.0
EXIT_TIMEOUT_S = 5.0


def restart_delay(failures: int) -> float:
    """Return the seconds before the next start, after a number of consecutive failures.

    >>> [restart_delay(n) for n in (1, 2, 3, 4, 99)]
    [0.0, 1.0, 2.0, 4.0, 30.0]
    """
    return 0.0 if failures <= 1 else min(2.0 ** (min(failures, 10) - 2), MAX_RESTART_DELAY_S)


class WorkerProcess(Protocol):
    """A worker that was started."""

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""
        ...

    def kill(self) -> None:
        """Kill it."""
        ...


Launch: TypeAlias = Callable[[str], Awaitable[tuple[socket.socket, WorkerProcess]]]
"""Starts a worker with these `WorkerSettings` as JSON; returns the socket to it."""


class Supervisor:
    """Starts the worker of an engine client, and restarts it when it dies or stalls.

    `launch` starts a worker; by default it is a process on this machine.
    """

    def __init__(
        self,
        engine: EngineClient,
        settings: WorkerSettings,
        stall_timeout: float,
        launch: Launch | None = None,
    ) -> None:
        self.restarts = 0
        self.started_at = 0.0
        """When the last worker was started."""
        self._launch = launch or self._start_process
        self._engine, self._settings, self._stall_timeout = engine, settings, stall_timeout
        self._stopping = asyncio.Event()

    @property
    def stalled(self) -> bool:
        """Whether requests are outstanding and no step has completed for too long."""
        engine = self._engine
        idle = not engine.ready or not engine.num_outstanding
        return not idle and time.monotonic() - engine.last_step_at > self._stall_timeout

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    async def run(self) -> None:
        """Start workers until `stop` is called."""
        failures, earlier = 0, self._engine.info
        while True:
            self.started_at = time.monotonic()
            await self._run_worker()
            engine = self._engine
            if self._stopping.is_set():
                return
            if engine.startup_error is not None and engine.info is earlier:
                raise IngotError(engine.startup_error.message, hint=engine.startup_error.hint)
            steady = engine.ready_at is not None and time.monotonic() - engine.ready_at > STEADY_S
            failures = 1 if steady else failures + 1
            self.restarts += 1
            wait = restart_delay(failures)
            _log.warning("restarting the engine in %.0f s", wait)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait)
                return

    def stop(self, reason: str) -> None:
        """Stop the worker and start no other; `run` returns when it has exited."""
        self._stopping.set()
        self._engine.on_worker_lost(reason)

    async def _run_worker(self) -> None:
        """Run one worker, from its start to its exit."""
        launching = asyncio.ensure_future(self._launch(self._worker_settings()))
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((launching, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not launching.done():
            launching.cancel()
        try:
            connection, process = await launching
        except asyncio.CancelledError:
            return
        except IngotError as error:
            if self._engine.info is None:
                raise
            _log.error("the engine could not be started: %s", error.message)
            return
        protocol, loop = self._engine.connect(), asyncio.get_running_loop()
        is_unix = connection.family == socket.AF_UNIX
        connect = loop.create_unix_connection if is_unix else loop.create_connection
        await connect(lambda: protocol, sock=connection)
        await self._watch(process)
        status = await _wait_for_exit(process)
        if not self._stopping.is_set():
            _log.warning("the engine process exited with status %s", status)

    async def _start_process(self, settings: str) -> tuple[socket.socket, WorkerProcess]:
        return await asyncio.to_thread(fork_server.fork, settings, self._settings.weights_fd)

    def _worker_settings(self) -> str:
        """Return the settings as JSON; after a restart, with the adapters of the last worker."""
        settings, engine = self._settings, self._engine
        if engine.info is not None and engine.info.embedding_dim is None:
            adapters = {one.name: one.directory for one in engine.adapters.values()}
            settings = msgspec.structs.replace(
                settings,
                adapters=adapters,
                max_loras=engine.info.max_loras,
                max_lora_rank=engine.info.max_lora_rank,
                skip_broken_adapters=True,
            )
        return msgspec.json.encode(settings).decode()

    async def _watch(self, process: WorkerProcess) -> None:
        engine = self._engine
        if self._stopping.is_set():  # before the connection was made
            engine.on_worker_lost("the server is stopping")
        while not engine.disconnected.is_set():
            with contextlib.suppress(TimeoutError):
                interval = min(1.0, self._stall_timeout / 4)
                await asyncio.wait_for(engine.disconnected.wait(), interval)
            if self.stalled:
                process.kill()
                engine.on_worker_lost(f"no engine step completed for {self._stall_timeout:g} s")


async def _wait_for_exit(process: WorkerProcess) -> int:
    """Return the exit status of a worker whose socket is closed; it exits after the current step,
    or is killed."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while (status := process.poll()) is None:
        if time.monotonic() > deadline:
            process.kill()
            deadline += EXIT_TIMEOUT_S
        await asyncio.sleep(0.01)
    return status
