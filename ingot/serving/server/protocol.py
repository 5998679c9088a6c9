"""uvicorn's connections, with bounds.

uvicorn reads a request's head however long it is and however long it takes. Here a head has at
most `MAX_HEAD` bytes and `HEAD_SECONDS`, from its first byte or from the connection's start.

The connection's transport goes into the scope: a stream's tokens are written to it without a task
that wakes up for each of them, and the bytes that a client has not read are counted there.
"""

# pyright: basic
from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 1 << 16
MAX_HEADERS = 128
HEAD_SECONDS = 20.0
TRANSPORT = "ingot.transport"


class Bounded(HttpToolsProtocol):
    """A connection that cannot ask for more than its share before it has asked for anything."""

    _head: int | None = 0  # bytes of the head so far; None when it is complete
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._start()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count what belongs to a head."""
        super().data_received(data)
        if self._head is not None:
            self._head += len(data)
            if self._head > MAX_HEAD and not self.transport.is_closing():
                self.send_400_response("The head of the request is too long.")

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._head = 0
        self._start()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; an error here is answered by 400."""
        if len(self.headers) >= MAX_HEADERS or len(self.url) > MAX_HEAD:
            raise ValueError("too many headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """End a head."""
        self._head = None
        self._stop()
        cast(dict[str, Any], self.scope)[TRANSPORT] = self.transport
        super().on_headers_complete()

    def _start(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEAD_SECONDS, self._late)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        self.transport.abort()
