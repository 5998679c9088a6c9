"""The engine as the HTTP process sees it: requests go in, their outputs come back.

`Front` outlives workers. A worker that dies, or says what cannot be understood, is lost: everybody
who waits for it is told so at once, and the supervisor brings the next one.

All runs in the event loop's thread, and a step's frame is dealt with in one go: the outputs to
their sinks, then one write for each client.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count
from typing import Protocol, cast

from ingot.core.log import logger
from ingot.serving.engine.output import EngineStats, Output
from ingot.serving.engine.request import Abort, FinishReason, Request
from ingot.serving.server import wire

_log = logger(__name__)


class Client(Protocol):
    """Whoever is written to once a step."""

    def flush(self) -> None:
        """Write what has gathered."""
        ...


class Sink(Protocol):
    """Where the outputs of one request go."""

    @property
    def client(self) -> Client:
        """To be flushed after a step."""
        ...

    def take(self, output: Output, now: float) -> None:
        """What a step did for it."""
        ...

    def fail(self, status: int, what: str, hint: str) -> None:
        """Nothing more comes."""
        ...


class Front:
    """Requests that wait for the engine, and the engine's last words."""

    def __init__(self) -> None:
        self.hello: wire.Hello | None = None
        """The facts of the model, once it was loaded; they stay when the worker dies."""
        self.stats: EngineStats | None = None
        self.doing = "starting"
        """What the worker does before it is ready."""
        self.ready = False
        """Whether there is a worker with a loaded model."""
        self.broken: wire.Broken | None = None
        """Why the last worker left by itself."""
        self.retired = 0.0
        """When the last step was; or, if nothing was to be done since, when there was."""
        self.lost = asyncio.Event()
        """Set when the worker is gone."""
        self.changed: Callable[[], None] = lambda: None
        """Called when `doing` or `ready` changes."""
        self._sinks: dict[int, Sink] = {}
        self._ids = count(1)
        self._link: asyncio.Transport | None = None

    @property
    def outstanding(self) -> int:
        """How many requests wait for the engine."""
        return len(self._sinks)

    def connect(self) -> asyncio.Protocol:
        """A protocol for the socket of a new worker."""
        self.stats, self.doing, self.ready, self.broken = None, "starting", False, None
        self.lost = asyncio.Event()
        return _Link(self)

    def new_id(self) -> int:
        """A number that no request had before."""
        return next(self._ids)

    def add(self, request: Request, sink: Sink) -> None:
        """Send a request to the engine. Its sink hears of it until it has ended."""
        if self._link is None or not self.ready:
            sink.fail(503, "the engine is not there", "try again in a few seconds")
            return
        frame = wire.frame(request)
        if not self._sinks:
            self.retired = time.monotonic()
        self._sinks[request.id] = sink
        self._link.write(frame)

    def end(self, id: int, reason: FinishReason) -> None:
        """End a request, of which nothing more is heard."""
        if self._sinks.pop(id, None) is not None and self._link is not None:
            self._link.write(wire.frame(Abort(id, reason)))

    def lose(self, why: str) -> None:
        """The worker is gone: tell everybody."""
        link, self._link = self._link, None
        self.ready = False
        if link is not None:
            link.abort()
        sinks, self._sinks = self._sinks, {}
        if sinks:
            _log.error("%s; requests in flight: %d", why, len(sinks))
        for sink in sinks.values():
            sink.fail(503, why, "send the request again: the engine is being restarted")
        _flush({sink.client for sink in sinks.values()})
        self.lost.set()
        self.changed()

    # From the worker

    def linked(self, link: asyncio.Transport) -> None:
        """The socket is connected."""
        self._link = link

    def unlinked(self, link: asyncio.Transport) -> None:
        """The socket is closed; one that was lost before matters no more."""
        if link is self._link:
            self.lose(self.broken.what if self.broken else "the engine has died")

    def hear(self, content: bytes) -> None:
        """Take a frame of the worker's."""
        message = wire.to_front(content)
        if isinstance(message, wire.Step):
            self._step(message)
        elif isinstance(message, wire.Refused):
            sink = self._sinks.pop(message.id, None)
            if sink is not None:
                sink.fail(422, message.what, message.hint)
                _flush({sink.client})
        elif isinstance(message, wire.Loading):
            self.doing = message.what
            self.changed()
        elif isinstance(message, wire.Hello):
            self.hello, self.ready, self.doing = message, True, "serving"
            self.changed()
        else:
            self.broken = message

    def _step(self, step: wire.Step) -> None:
        now = time.monotonic()
        self.retired, self.stats = now, step.stats
        sinks = self._sinks
        clients: set[Client] = set()
        for output in step.outputs:
            sink = sinks.get(output.id)
            if sink is None:
                continue
            if output.finish_reason is not None:
                del sinks[output.id]
            clients.add(sink.client)
            try:
                sink.take(output, now)
            except Exception:  # of one client; the others go on
                _log.exception("an output could not be passed on")
                self.end(output.id, FinishReason.CANCELLED)
                sink.fail(500, "the answer could not be written", "report it: this is a bug")
        _flush(clients)


def _flush(clients: set[Client]) -> None:
    for client in clients:
        try:
            client.flush()
        except Exception:
            _log.exception("an answer could not be written")


class _Link(asyncio.Protocol):
    """The socket to one worker."""

    def __init__(self, front: Front) -> None:
        self._front, self._frames = front, wire.Frames()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._front.linked(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            for content in self._frames.feed(data):
                self._front.hear(content)
        except wire.WireError as error:
            _log.error("the engine is not understood: %s", error.message)
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._front.unlinked(self._transport)
