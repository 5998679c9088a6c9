"""Keeps a worker running.

A worker is dead when its socket closes, and stuck when requests are outstanding and no step has
retired for `stall` seconds: then it is killed. Either way those who wait are told at once, and the
next worker starts: the first time immediately, then after 1, 2, 4... seconds, at most 30, until
one has served for a minute. A worker that says why it cannot serve, before any has, is not
tried again: `Supervisor.run` raises it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time

import msgspec

from ingot.core.errors import IngotError
from ingot.core.log import logger
from ingot.serving.server.engine_client import Front
from ingot.serving.server.worker import Settings

_log = logger(__name__)
MAX_WAIT = 30.0
STEADY = 60.0
LEAVE_SECONDS = 5.0


def delay(failures: int) -> float:
    """The seconds before the next worker, after so many that failed in a row.

    >>> [delay(n) for n in (1, 2, 3, 4, 99)]
    [0.0, 1.0, 2.0, 4.0, 30.0]
    """
    return 0.0 if failures <= 1 else min(2.0 ** (min(failures, 10) - 2), MAX_WAIT)


class Supervisor:
    """The worker of a front, one after another."""

    command: tuple[str, ...] = (sys.executable, "-m", "ingot.serving.server.worker")

    def __init__(self, front: Front, settings: Settings, stall: float) -> None:
        self.restarts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._front, self._settings, self._stall = front, settings, stall
        self._stopping = asyncio.Event()

    @property
    def stuck(self) -> bool:
        """Whether work is outstanding and no step has retired for too long."""
        front = self._front
        idle = not front.ready or not front.outstanding
        return not idle and time.monotonic() - front.retired > self._stall

    async def run(self) -> None:
        """Start workers until told to stop."""
        failures = 0
        while True:
            started = time.monotonic()
            await self._serve()
            front = self._front
            if self._stopping.is_set():
                return
            if front.broken is not None and front.hello is None:
                raise IngotError(front.broken.what, hint=front.broken.hint)
            steady = front.hello is not None and time.monotonic() - started > STEADY
            failures = 1 if steady else failures + 1
            self.restarts += 1
            wait = delay(failures)
            _log.warning("the engine is restarted in %.0f s", wait)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait)
                return

    def stop(self, why: str) -> None:
        """End the worker and start no other; `run` returns when it is gone."""
        self._stopping.set()
        self._front.lose(why)

    async def _serve(self) -> None:
        """One worker, from its start to its end."""
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C in the terminal is for us, and we tell it.
            self.process = process = subprocess.Popen(
                [*self.command, str(theirs.fileno()), msgspec.json.encode(self._settings).decode()],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        protocol = self._front.connect()
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: protocol, sock=ours)
        await self._watch()
        await _end(process)
        if not self._stopping.is_set():
            _log.warning("the engine's process has ended with status %s", process.returncode)

    async def _watch(self) -> None:
        if self._stopping.is_set():  # before there was anything to lose
            self._front.lose("the server is stopping")
        while not self._front.lost.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._front.lost.wait(), min(1.0, self._stall / 4))
            if self.stuck:
                assert self.process is not None
                self.process.kill()
                self._front.lose(f"the engine has not finished a step for {self._stall:g} s")


async def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for it. It leaves when its socket is closed, after the step it is in; or is killed."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.kill()
        await asyncio.sleep(0.01)
