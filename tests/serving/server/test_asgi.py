from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from ingot.serving.server.asgi import Receive, Scope, Send, headers_of


def test_headers_keep_their_order_and_duplicates() -> None:
    headers = [(b"host", b"x"), (b"accept", b"a"), (b"accept", b"b")]
    assert headers_of({"type": "http", "headers": headers}) == headers


def test_types_fit_an_application_of_starlette() -> None:
    """The same scope serves an application with these types and Starlette's `Request`."""
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        assert dict(headers_of(scope)) == {b"host": b"x"}
        await send({"type": "http.response.body", "body": body})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app({"type": "http", "headers": [(b"host", b"x")]}, receive, send))
    assert sent == [{"type": "http.response.body", "body": b"{}"}]
