"""ASGI types, and access to the headers of a request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def headers_of(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers of a request.

    >>> headers_of({"headers": [(b"host", b"x")]})
    [(b'host', b'x')]
    """
    return scope["headers"]
