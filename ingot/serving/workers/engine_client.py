"""Client of one engine process: sends requests, receives outputs.

An `EngineClient` outlives workers. It remembers what each request has returned so far; if a worker
dies or sends malformed messages, its requests are handed to `on_lost`, which can continue them on
another engine, and the supervisor starts the next worker.

Everything runs in the event loop's thread. The outputs of a step are passed to their handlers
together, followed by one write per HTTP response.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol, cast

import msgspec

from ingot.core.errors import IngotError
from ingot.core.log import logger
from ingot.serving.engine.adapters import LoadedAdapter
from ingot.serving.engine.output import EngineStats, Output
from ingot.serving.engine.request import Abort, AnyRequest, FinishReason, Request
from ingot.serving.workers import wire

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


class Outstanding:
    """A request that has not finished, and what it has returned so far.

    >>> request = Request(id=1, prompt=(5, 6), max_tokens=9)
    >>> one = Outstanding(request, cast(OutputHandler, None))
    >>> one.new_tokens += (7, 8)
    >>> one.prepare_retry()
    >>> one.request.tokens, one.new_tokens, one.num_losses
    ((5, 6, 7, 8), [], 1)
    >>> one.prepare_retry()
    >>> one.num_losses, one.num_stuck
    (2, 2)
    """

    __slots__ = (
        "adapter_digest",
        "handler",
        "new_tokens",
        "num_losses",
        "num_prompt_logprobs",
        "num_stuck",
        "queued_since",
        "request",
        "session",
    )

    def __init__(self, request: AnyRequest, handler: OutputHandler, session: str = "") -> None:
        self.request, self.handler, self.session = request, handler, session
        self.new_tokens: list[int] = []  # of the current engine
        self.num_prompt_logprobs = 0
        self.num_losses = 0  # of engines that had it
        self.num_stuck = 0  # of them, since its last new token
        self.adapter_digest: str | None = None
        self.queued_since: float | None = None  # None once it is computed

    def prepare_retry(self) -> None:
        """Make the request one for another engine, which continues after the tokens so far."""
        if isinstance(self.request, Request):
            self.request = self._continue(self.request)
        self.num_stuck = 1 if self.new_tokens else self.num_stuck + 1
        self.new_tokens, self.num_prompt_logprobs = [], 0
        self.num_losses += 1

    def _continue(self, request: Request) -> Request:
        params, generated = request.sampling_params, request.generated + tuple(self.new_tokens)
        if generated:
            params = msgspec.structs.replace(params, prompt_logprobs=None)
        elif self.num_prompt_logprobs:
            start = max(params.prompt_logprobs_start, 1) + self.num_prompt_logprobs
            params = msgspec.structs.replace(params, prompt_logprobs_start=start)
        return msgspec.structs.replace(request, generated=generated, sampling_params=params)


class EngineClient:
    """Outstanding requests of an engine process, and its state."""

    def __init__(self) -> None:
        self.info: wire.EngineReady | None = None
        """Model and KV-cache sizes, once loaded; kept when the worker dies."""
        self.stats: EngineStats | None = None
        self.status = "starting"
        """Progress of the worker before it is ready."""
        self.ready = False
        """Whether a worker with a loaded model is connected."""
        self.ready_at: float | None = None
        """When the last worker had loaded the model; None if it has not."""
        self.startup_error: wire.EngineFailed | None = None
        """Why the last worker could not load the model."""
        self.last_step_at = 0.0
        """Time of the last step, or of the first request after the engine was idle."""
        self.disconnected = asyncio.Event()
        """Set when the worker is lost."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called when a worker has loaded the model."""
        self.on_first_token: Callable[[int], None] = lambda id: None
        """Called with a request's id when its first token of this engine arrives."""
        self.on_finished: Callable[[int], None] = lambda id: None
        """Called with a request's id when it has finished or was aborted."""
        self.on_lost: Callable[[list[Outstanding], str], None] = lambda requests, reason: None
        """Called with the requests of a lost worker and the reason of the loss."""
        self.adapters: dict[str, LoadedAdapter] = {}
        """The adapters of the engine by name; kept when the worker dies, for the next one."""
        self._queue_delays: list[float] = []
        self._adapter_changes: dict[int, asyncio.Future[wire.AdaptersChanged]] = {}
        self._outstanding: dict[int, Outstanding] = {}
        self._message_ids = count(1)
        self._transport: asyncio.Transport | None = None

    @property
    def num_outstanding(self) -> int:
        """Number of requests that wait for the engine."""
        return len(self._outstanding)

    def connect(self) -> asyncio.Protocol:
        """Return a protocol for the socket of a new worker."""
        self.stats, self.status, self.ready, self.startup_error = None, "starting", False, None
        self.ready_at = None
        self.disconnected = asyncio.Event()
        return _WorkerProtocol(self)

    def add_requests(self, requests: Sequence[Outstanding]) -> None:
        """Send requests at once, so that the engine can compute them in one batch."""
        assert self._transport is not None
        assert self.ready
        now = time.monotonic()
        if not self._outstanding:
            self.last_step_at = now
        for one in requests:
            one.queued_since = now
            self._outstanding[one.request.id] = one
            one.adapter_digest = self.adapter_digest(one.request.adapter)
        self._transport.write(b"".join([wire.frame(one.request) for one in requests]))

    def take_queue_delays(self, now: float) -> list[float]:
        """Return how long requests waited that were admitted since the last call, and those that
        still wait."""
        delays, self._queue_delays = self._queue_delays, []
        outstanding = self._outstanding.values()
        return delays + [now - one.queued_since for one in outstanding if one.queued_since]

    def adapter_digest(self, name: str) -> str | None:
        """Return the digest of an adapter; None if there is none of this name."""
        adapter = self.adapters.get(name)
        return None if adapter is None else adapter.digest

    def abort(self, id: int, reason: FinishReason) -> None:
        """Abort a request; its handler receives nothing more."""
        if self._outstanding.pop(id, None) is not None:
            self.on_finished(id)
            if self._transport is not None:
                self._transport.write(wire.frame(Abort(id, reason)))

    async def load_adapter(self, name: str, directory: str, replace: bool) -> LoadedAdapter:
        """Load an adapter of a directory; raise the error of one that cannot be loaded."""
        id = next(self._message_ids)
        await self._change_adapters(wire.LoadAdapter(id, name, directory, replace))
        return self.adapters[name]

    async def unload_adapter(self, name: str) -> None:
        """Remove the name of an adapter; requests that use it finish."""
        await self._change_adapters(wire.UnloadAdapter(next(self._message_ids), name))

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
        """Hand over all outstanding requests: the worker is gone."""
        transport, self._transport = self._transport, None
        self.ready, self.stats = False, None
        if transport is not None:
            transport.abort()
        lost, self._outstanding = list(self._outstanding.values()), {}
        if lost:
            _log.error("%s; requests in flight: %d", reason, len(lost))
        changes, self._adapter_changes = self._adapter_changes, {}
        for change in [change for change in changes.values() if not change.done()]:
            change.set_exception(EngineUnavailable(reason, hint="retry in a few seconds"))
        self.disconnected.set()
        self.on_lost(lost, reason)

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
            one = self._outstanding.pop(message.id, None)
            if one is not None:
                self.on_finished(message.id)
                one.handler.on_error(422, message.message, message.hint)
                flush({one.handler.client})
        elif isinstance(message, wire.Loading):
            self.status = message.status
        elif isinstance(message, wire.AdaptersChanged):
            self.adapters = {adapter.name: adapter for adapter in message.adapters}
            change = self._adapter_changes.pop(message.id, None)
            if change is not None and not change.done():
                change.set_result(message)
        elif isinstance(message, wire.EngineReady):
            self.adapters = {adapter.name: adapter for adapter in message.adapters}
            self.info, self.ready, self.status = message, True, "serving"
            self.ready_at = time.monotonic()
            self.on_ready()
        else:
            self.startup_error = message

    def _on_step(self, step: wire.StepOutputs) -> None:
        now, step_began_at = time.monotonic(), self.last_step_at
        self.last_step_at, self.stats = now, step.stats
        outstanding = self._outstanding
        clients: set[Flushable] = set()
        for output in step.outputs:
            one = outstanding.get(output.id)
            if one is None:
                continue
            if one.queued_since is not None:
                self._queue_delays.append(max(0.0, step_began_at - one.queued_since))
                one.queued_since = None
            if output.tokens:
                if not one.new_tokens:
                    self.on_first_token(output.id)
                one.new_tokens += output.tokens
            if output.prompt_logprobs is not None:
                one.num_prompt_logprobs += len(output.prompt_logprobs)
            if output.finish_reason is not None:
                del outstanding[output.id]
                self.on_finished(output.id)
            handler = one.handler
            clients.add(handler.client)
            try:
                handler.on_output(output, now)
            except Exception:  # of one response; the others continue
                _log.exception("processing the output of request %d failed", output.id)
                self.abort(output.id, FinishReason.CANCELLED)
                handler.on_error(500, "the response could not be written", "report this bug")
        flush(clients)


def flush(clients: set[Flushable]) -> None:
    """Write the buffered events of responses; an error of one does not affect the others."""
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
