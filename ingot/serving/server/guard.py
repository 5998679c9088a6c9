"""ASGI middleware in front of the API: authentication, readiness, and limits on request bodies."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ingot.serving.server.asgi import Receive, Scope, Send, headers_of
from ingot.serving.server.errors import ApiError, error_response
from ingot.serving.server.gateway import VERSION, Gateway
from ingot.serving.server.page import PATHS
from ingot.serving.server.tensors import HEADER

MAX_BODY = 1 << 22
MAX_BODIES = 1 << 27
"""Total bytes of the bodies of all requests."""
MAX_DISCARDED = 1 << 26
"""Bytes of a body that are read and dropped so that the client reads the error response."""
BODY_TIMEOUT_S = 60.0
PUBLIC_PATHS = PATHS | {
    *("/healthz", "/readyz", "/openapi.json", "/v2/health/live", "/v2/health/ready")
}


class RequestGuard:
    """Rejects requests by API key, server state and body size; passes on the rest with the whole
    body."""

    def __init__(self, gateway: Gateway, app: Callable[..., Awaitable[None]]) -> None:
        self._gateway, self._app = gateway, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        gateway = self._gateway

        async def count_and_send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                gateway.statuses[message["status"]] += 1
                if VERSION in scope:
                    headers = [*message.get("headers", ()), _version_header(scope)]
                    message = {**message, "headers": headers}
            await send(message)

        if scope["path"] in PUBLIC_PATHS:
            await self._app(scope, receive, count_and_send)
            return
        body, held = _Body(receive), 0
        try:
            error = self._check(scope) or await self._read(scope, body)
            if error is not None:
                await body.discard()
                response = error_response(error, not body.complete, scope["path"])
                await response(scope, receive, count_and_send)
                return
            held = scope["ingot.size"] = len(body.content)
            scope["ingot.received_at"] = time.monotonic()
            gateway.body_bytes += held
            await self._app(scope, body.replay, count_and_send)
        finally:
            gateway.body_bytes -= held
            gateway.pool.update()

    def _check(self, scope: Scope) -> ApiError | None:
        tenant = self._gateway.tenant(scope)
        if tenant is None:
            hint = "send one of the server's keys: Authorization: Bearer KEY"
            return ApiError(401, "missing or wrong API key", hint, code="invalid_api_key")
        scope["ingot.tenant"] = tenant
        if scope["method"] != "POST":
            return None
        # Web pages may send other content types to this machine without a preflight request.
        if not any(_is_json(*header) for header in headers_of(scope)) and not _is_binary(scope):
            message = "the content type must be application/json"
            return ApiError(415, message, "send Content-Type: application/json")
        return self._gateway.unavailable_reason()

    async def _read(self, scope: Scope, body: _Body) -> ApiError | None:
        """Read the body; return an error if it is too large or too slow."""
        hint = "send less in one request"
        too_large = ApiError(413, f"the body must have at most {MAX_BODY:,} bytes", hint)
        for name, value in headers_of(scope):
            if name == b"content-length" and int(value) > MAX_BODY:
                return too_large
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while not body.complete:
                    body.content += await body.next()
                    if len(body.content) > MAX_BODY:
                        return too_large
                    if self._gateway.body_bytes + len(body.content) > MAX_BODIES:
                        return ApiError(429, "too many large requests at a time", "wait", 1)
        except TimeoutError:
            message = f"the body was not received within {BODY_TIMEOUT_S:g} s"
            return ApiError(408, message, "send it faster")
        return None


class _Body:
    """A request body that is being received."""

    def __init__(self, receive: Receive) -> None:
        self.content = bytearray()
        self.complete = False
        self._receive, self._replayed = receive, False

    async def next(self) -> bytes:
        """Return the next part."""
        message = await self._receive()
        self.complete = not message.get("more_body", False)
        return message.get("body", b"")

    async def discard(self) -> None:
        """Read the rest, within limits: most clients read a response only after sending it all."""
        self.content, left = bytearray(), MAX_DISCARDED
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BODY_TIMEOUT_S / 6):
                while not self.complete and left > 0:
                    left -= len(await self.next())

    async def replay(self) -> MutableMapping[str, Any]:
        """Pass the whole body to the application, then any later messages."""
        if self._replayed:
            return await self._receive()
        self._replayed, content = True, bytes(self.content)
        self.content = bytearray()
        return {"type": "http.request", "body": content, "more_body": False}


def _version_header(scope: Scope) -> tuple[bytes, bytes]:
    return b"x-model-version", scope[VERSION].encode()


def _is_json(name: bytes, value: bytes) -> bool:
    """Return whether a header is the content type of JSON."""
    return name == b"content-type" and _media_type(value) == b"application/json"


def _is_binary(scope: Scope) -> bool:
    """Return whether a request may have tensors as binary data, and has a header for it.

    Web pages cannot send either header without a preflight request.
    """
    if re.fullmatch("/v2/models/[^/]+/infer", scope["path"]) is None:
        return False
    return any(
        name == HEADER.encode()
        or (name == b"content-type" and _media_type(value) == b"application/octet-stream")
        for name, value in headers_of(scope)
    )


def _media_type(value: bytes) -> bytes:
    return value.partition(b";")[0].strip().lower()
