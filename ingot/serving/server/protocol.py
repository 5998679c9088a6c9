"""uvicorn's HTTP protocol with limits on the request head.

uvicorn reads a request head of any length, for any time. Here a head has at most `MAX_HEAD` bytes
and `HEAD_TIMEOUT_S`, from its first byte or from the start of the connection.

The connection's transport is put into the scope: streamed tokens are written to it without waking a
task for each, and its buffer size shows how much a client has not read.
"""

# pyright: basic
from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 1 << 16
MAX_HEADERS = 128
HEAD_TIMEOUT_S = 20.0
TRANSPORT = "ingot.transport"


class LimitedHttpProtocol(HttpToolsProtocol):
    """A connection with limits on the size and duration of request heads."""

    _head: int | None = 0  # bytes of the head so far; None when it is complete
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the timeout."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeout."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of the head."""
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > MAX_HEAD and not self.transport.is_closing():
                self.send_400_response("Request head too long.")

    def on_message_begin(self) -> None:
        """Start a head."""
        super().on_message_begin()
        self._head = 0
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Check the number of headers; an error is answered with 400."""
        if len(self.headers) >= MAX_HEADERS or len(self.url) > MAX_HEAD:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Finish a head."""
        self._head = None
        self._stop_timer()
        cast(dict[str, Any], self.scope)[TRANSPORT] = self.transport
        super().on_headers_complete()

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        self.transport.abort()
