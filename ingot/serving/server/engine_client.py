"""Client of the engine process: sends requests, receives outputs.

An `EngineClient` outlives workers. If a worker dies or sends malformed messages, the requests that
wait for it fail at once, and the supervisor starts the next worker.

Everything runs in the event loop's thread. The outputs of a step are passed to their handlers
together, followed by one write per HTTP response.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol, cast

from ingot.core.errors import IngotError
from ingot.core.log import logger
from ingot.serving.engine.adapters import LoadedAdapter
from ingot.serving.engine.output import EngineStats, Output
from ingot.serving.engine.request import Abort, FinishReason, InferenceRequest, Request
from ingot.serving.server import wire

_log = logger(__name__)


class Flushable(Protocol):
    """A response that is written once per step."""

    def flush(self) -> None:
        """Write the buffered events."""
        ...


class OutputHandler(Protocol):
    """Receives the outputs of one request."""

    @property
    def client(self) -> Flushable:
        """The response to flush after the step."""
        ...

    def on_output(self, output: Output, now: float) -> None:
        """Process the output of a step."""
        ...

    def on_error(self, status: int, message: str, hint: str) -> None:
        """Fail the request; no output follows."""
        ...


class EngineUnavailable(IngotError):
    """No worker with a loaded model is connected."""


class EngineClient:
    """Outstanding requests, and the state of the engine process."""

    def __init__(self) -> None:
        self.info: wire.EngineReady | None = None
        """Model and KV-cache sizes, once loaded; kept when the worker dies."""
        self.stats: EngineStats | None = None
        self.status = "starting"
        """Progress of the worker before it is ready."""
        self.ready = False
        """Whether a worker with a loaded model is connected."""
        self.startup_error: wire.EngineFailed | None = None
        """Why the last worker could not load the model."""
        self.last_step_at = 0.0
        """Time of the last step, or of the first request after the engine was idle."""
        self.disconnected = asyncio.Event()
        """Set when the worker is lost."""
        self.on_status_change: Callable[[], None] = lambda: None
        """Called when `status` or `ready` changes."""
        self.adapters: dict[str, LoadedAdapter] = {}
        """The adapters of the engine by name; kept when the worker dies, for the next one."""
        self._adapter_changes: dict[int, asyncio.Future[wire.AdaptersChanged]] = {}
        self._handlers: dict[int, OutputHandler] = {}
        self._ids = count(1)
        self._transport: asyncio.Transport | None = None

    @property
    def num_outstanding(self) -> int:
        """Number of requests that wait for the engine."""
        return len(self._handlers)

    def connect(self) -> asyncio.Protocol:
        """Return a protocol for the socket of a new worker."""
        self.stats, self.status, self.ready, self.startup_error = None, "starting", False, None
        self.disconnected = asyncio.Event()
        return _WorkerProtocol(self)

    def new_id(self) -> int:
        """Return a request id that was not used before."""
        return next(self._ids)

    def add_request(self, request: Request | InferenceRequest, handler: OutputHandler) -> None:
        """Send a request to the engine; its outputs go to `handler` until it finishes."""
        self.add_requests([(request, handler)])

    def add_requests(
        self, requests: Sequence[tuple[Request | InferenceRequest, OutputHandler]]
    ) -> None:
        """Send requests at once, so that the engine can compute them in one batch."""
        if self._transport is None or not self.ready:
            for _, handler in requests:
                handler.on_error(503, "the engine is not available", "retry in a few seconds")
            return
        frames = b"".join([wire.frame(request) for request, _ in requests])
        if not self._handlers:
            self.last_step_at = time.monotonic()
        self._handlers |= {request.id: handler for request, handler in requests}
        self._transport.write(frames)

    def abort(self, id: int, reason: FinishReason) -> None:
        """Abort a request; its handler receives nothing more."""
        if self._handlers.pop(id, None) is not None and self._transport is not None:
            self._transport.write(wire.frame(Abort(id, reason)))

    async def load_adapter(self, name: str, directory: str, replace: bool) -> LoadedAdapter:
        """Load an adapter of a directory; raise the error of one that cannot be loaded."""
        await self._change_adapters(wire.LoadAdapter(self.new_id(), name, directory, replace))
        return self.adapters[name]

    async def unload_adapter(self, name: str) -> None:
        """Remove the name of an adapter; requests that use it finish."""
        await self._change_adapters(wire.UnloadAdapter(self.new_id(), name))

    async def _change_adapters(self, message: wire.LoadAdapter | wire.UnloadAdapter) -> None:
        if self._transport is None or not self.ready:
            raise EngineUnavailable("the engine is not available", hint="retry in a few seconds")
        future = asyncio.get_running_loop().create_future()
        self._adapter_changes[message.id] = future
        self._transport.write(wire.frame(message))
        changed = await future
        if changed.message is not None:
            raise IngotError(changed.message, hint=changed.hint)

    def on_worker_lost(self, reason: str) -> None:
        """Fail all outstanding requests: the worker is gone."""
        transport, self._transport = self._transport, None
        self.ready = False
        if transport is not None:
            transport.abort()
        handlers, self._handlers = self._handlers, {}
        if handlers:
            _log.error("%s; requests in flight: %d", reason, len(handlers))
        for handler in handlers.values():
            handler.on_error(503, reason, "send the request again: the engine is being restarted")
        _flush({handler.client for handler in handlers.values()})
        changes, self._adapter_changes = self._adapter_changes, {}
        for change in [change for change in changes.values() if not change.done()]:
            change.set_exception(EngineUnavailable(reason, hint="retry in a few seconds"))
        self.disconnected.set()
        self.on_status_change()

    # Events of the socket

    def on_connected(self, transport: asyncio.Transport) -> None:
        """Use the socket of a new worker."""
        self._transport = transport

    def on_disconnected(self, transport: asyncio.Transport) -> None:
        """Handle a closed socket; one of an earlier worker is ignored."""
        if transport is self._transport:
            error = self.startup_error
            self.on_worker_lost(error.message if error else "the engine process died")

    def on_message(self, content: bytes) -> None:
        """Process a frame sent by the worker."""
        message = wire.to_client(content)
        if isinstance(message, wire.StepOutputs):
            self._on_step(message)
        elif isinstance(message, wire.RequestRejected):
            handler = self._handlers.pop(message.id, None)
            if handler is not None:
                handler.on_error(422, message.message, message.hint)
                _flush({handler.client})
        elif isinstance(message, wire.Loading):
            self.status = message.status
            self.on_status_change()
        elif isinstance(message, wire.AdaptersChanged):
            self.adapters = {adapter.name: adapter for adapter in message.adapters}
            change = self._adapter_changes.pop(message.id, None)
            if change is not None and not change.done():
                change.set_result(message)
        elif isinstance(message, wire.EngineReady):
            self.adapters = {adapter.name: adapter for adapter in message.adapters}
            self.info, self.ready, self.status = message, True, "serving"
            self.on_status_change()
        else:
            self.startup_error = message

    def _on_step(self, step: wire.StepOutputs) -> None:
        now = time.monotonic()
        self.last_step_at, self.stats = now, step.stats
        handlers = self._handlers
        clients: set[Flushable] = set()
        for output in step.outputs:
            handler = handlers.get(output.id)
            if handler is None:
                continue
            if output.finish_reason is not None:
                del handlers[output.id]
            clients.add(handler.client)
            try:
                handler.on_output(output, now)
            except Exception:  # of one response; the others continue
                _log.exception("processing the output of request %d failed", output.id)
                self.abort(output.id, FinishReason.CANCELLED)
                handler.on_error(500, "the response could not be written", "report this bug")
        _flush(clients)


def _flush(clients: set[Flushable]) -> None:
    for client in clients:
        try:
            client.flush()
        except Exception:
            _log.exception("writing a response failed")


class _WorkerProtocol(asyncio.Protocol):
    """The socket to one worker."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine, self._frames = engine, wire.Frames()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._engine.on_connected(self._transport)

    def data_received(self, data: bytes) -> None:
        try:
            for content in self._frames.feed(data):
                self._engine.on_message(content)
        except wire.WireError as error:
            _log.error("invalid message from engine: %s", error.message)
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._engine.on_disconnected(self._transport)
