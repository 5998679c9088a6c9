"""The response to a request that the engine computes: text, streamed or not, or tensors.

It waits for the engine and for the client, whichever ends first: if the client disconnects, its
requests are aborted at once. Nothing is sent before the first token, so that errors until then get
their status.
"""

from __future__ import annotations

import asyncio
import time
from typing import TypeAlias

from starlette.responses import Response

from ingot.core.log import logger
from ingot.serving.server.admission import Admission, Ticket, VersionAdmission
from ingot.serving.server.asgi import Receive, Scope, Send
from ingot.serving.server.completion import CompletionStream
from ingot.serving.server.embedding import EmbeddingBatch
from ingot.serving.server.errors import ApiError, error_response
from ingot.serving.server.inference import TensorBatch
from ingot.serving.server.metrics import Metrics
from ingot.serving.server.protocol import TRANSPORT
from ingot.serving.server.tracing import TRACE

MAX_UNREAD = 1 << 18
"""Bytes of a stream that a client may leave unread, in addition to the socket's buffers."""
SLOW_CLIENT_TIMEOUT_S = 30.0
"""How long a client may take to read the end of its response."""
DEADLINE_SLACK_S = 0.5
"""How long the engine has to report a missed deadline itself."""
_access_log = logger("ingot.serving.access")
_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

AnyResponse: TypeAlias = CompletionStream | EmbeddingBatch | TensorBatch


class EngineResponse(Response):
    """A response that is computed by the engine."""

    def __init__(
        self,
        completion: AnyResponse,
        ticket: Ticket,
        *,
        admission: Admission | VersionAdmission,
        metrics: Metrics,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._completion, self._ticket = completion, ticket
        self._admission, self._metrics = admission, metrics
        self._streaming = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        completion = self._completion
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        try:
            completion.submit()
            if await self._wait(completion.began, disconnect) and completion.error is None:
                if isinstance(completion, CompletionStream) and completion.job.stream:
                    await self._stream(completion, scope, send, disconnect)
                elif await self._wait(completion.done, disconnect) and completion.error is None:
                    await completion.response()(scope, receive, send)
            if completion.error is not None and not self._streaming:
                response = error_response(completion.error, path=scope["path"])
                await response(scope, receive, send)
        finally:
            aborted = disconnect.done() and not completion.done.done()
            disconnect.cancel()
            completion.cancel()
            if TRACE in scope:
                scope[TRACE].record(completion, aborted)
            self._record(aborted)

    async def _wait(self, event: asyncio.Future[None], disconnect: asyncio.Future[None]) -> bool:
        """Wait for the event; return False if the client disconnected first. A missed deadline
        fails the request."""
        deadline = self._completion.context.deadline
        assert deadline is not None
        left = deadline + DEADLINE_SLACK_S - time.monotonic()
        await asyncio.wait((event, disconnect), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not event.done() and not disconnect.done():
            hint = "raise `timeout` or lower `max_tokens`"
            self._completion.fail(ApiError(504, "request timed out", hint))
        return event.done()

    async def _stream(
        self,
        completion: CompletionStream,
        scope: Scope,
        send: Send,
        disconnect: asyncio.Future[None],
    ) -> None:
        transport: asyncio.Transport = scope[TRANSPORT]
        self._streaming = True
        await send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})

        def write(data: bytes) -> None:
            if transport.is_closing():
                return  # and `disconnect` is, or will be, done
            if transport.get_write_buffer_size() > MAX_UNREAD:
                transport.abort()
            else:
                transport.write(b"%x\r\n%b\r\n" % (len(data), data))

        completion.stream_to(write)
        await self._wait(completion.done, disconnect)
        completion.flush()
        if completion.done.done():
            try:
                last = send({"type": "http.response.body", "body": b"", "more_body": False})
                await asyncio.wait_for(last, SLOW_CLIENT_TIMEOUT_S)
            except TimeoutError:
                transport.abort()

    def _record(self, aborted: bool) -> None:
        """Release the admission ticket; count and log the request."""
        completion, now = self._completion, time.monotonic()
        self._admission.release(self._ticket, now)
        completion.context.on_end(completion, aborted)
        error = completion.error
        reason = "abort" if aborted else "error" if error else completion.choices[0].finish_reason
        seconds = now - completion.started
        self._metrics.record_request(
            reason or "error",
            ttft=completion.ttft,
            e2e=seconds,
            prompt_tokens=completion.num_prompt_tokens,
            generated_tokens=completion.num_generated_tokens,
        )
        fields = {
            "id": completion.id,
            "tenant": self._ticket.tenant.name,
            "finish_reason": reason,
            "status": error.status if error else 200,
            "error": error.message if error else None,
            "choices": len(completion.choices),
            "prompt_tokens": completion.num_prompt_tokens,
            "cached_tokens": completion.num_cached_tokens,
            "generated_tokens": completion.num_generated_tokens,
            "ttft_s": completion.ttft and round(completion.ttft, 4),
            "e2e_s": round(seconds, 4),
        }
        _access_log.info(
            "%s, %s: %s, %d prompt + %d generated tokens in %.2f s",
            *(completion.id, fields["tenant"], fields["error"] or reason),
            *(completion.num_prompt_tokens, completion.num_generated_tokens, seconds),
            extra={"fields": fields},
        )


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
