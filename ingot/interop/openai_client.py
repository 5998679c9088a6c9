"""A client of OpenAI-compatible servers: ingot, vLLM, SGLang.

    client = OpenAIClient("http://127.0.0.1:8000", key)
    client.send("completions", Completion, {"model": client.find_model(), "prompt": "Hello"})

A request that the server rejects because it is overloaded or restarting (429, 502, 503, 504), or
whose connection breaks, is sent again after a pause: that of `Retry-After`, or one that doubles
each time. Redirects are not followed, so that the API key reaches only the named server. The server
is not trusted: the size of a response is bounded, and it is decoded into a given type.
"""

from __future__ import annotations

import http.client
import random
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from ingot.core.errors import ConfigError, IngotError

MAX_ATTEMPTS = 10
MAX_PAUSE_S = 30.0
MAX_BODY = 1 << 28  # bytes of a response
TIMEOUT_S = 3600.0  # of a response: a long answer of a slow server
_RETRIED = frozenset({429, 502, 503, 504})

T = TypeVar("T")


class ServerError(IngotError):
    """A server that cannot be reached, or whose response is not what it should be."""


class HttpStatusError(Exception):
    """A response with an error that another attempt would not change."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@dataclass(frozen=True)
class OpenAIClient:
    """Requests to the server at `url`, with or without `/v1`."""

    url: str
    key: str | None = field(default=None, repr=False)

    @property
    def base(self) -> str:
        """The address below which the endpoints are."""
        return base_url(self.url)

    def find_model(self, name: str | None = None) -> str:
        """Return the name of the only model, or check that the server has the given one."""
        try:
            listing = self.send("models", _Models)
        except HttpStatusError as error:
            hint = "give the API key" if error.status in (401, 403) else "check the URL"
            raise ServerError(
                f"{self.base}/models: the server answers {error.status}: {error.message}",
                hint=hint,
            ) from error
        names = [model.id for model in listing.data]
        if name is None and len(names) == 1:
            return names[0]
        if name is None or name not in names:
            wanted = "serves several models" if name is None else "lacks that model"
            raise ServerError(
                f"{self.base}: {wanted}: {', '.join(names[:20])}", hint="name one: --model-name"
            )
        return name

    def send(self, path: str, kind: type[T], body: dict[str, Any] | None = None) -> T:
        """Return the response of an endpoint; GET without a body."""
        headers = {"Content-Type": "application/json", "User-Agent": "ingot"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        content = None if body is None else msgspec.json.encode(body)
        url, reason = f"{self.base}/{path}", ""
        for attempt in range(MAX_ATTEMPTS):
            request = urllib.request.Request(url, content, headers)
            retry_after = None
            try:
                with _OPENER.open(request, timeout=TIMEOUT_S) as response:
                    return self._decode(path, kind, response.read(MAX_BODY + 1))
            except urllib.error.HTTPError as error:
                message, retry_after = _error_message(error), error.headers.get("Retry-After")
                reason = f"the server answers {error.code}: {message}"
                if error.code not in _RETRIED:
                    raise HttpStatusError(error.code, message) from error
            except (OSError, http.client.HTTPException) as error:
                reason = str(getattr(error, "reason", "") or error or type(error).__name__)
                if body is None:
                    break  # the first request: the address is wrong
            if attempt + 1 < MAX_ATTEMPTS:
                time.sleep(_pause(attempt, retry_after))
        raise ServerError(
            f"{url}: {reason}",
            hint="check that the server is running, then run the command again: it continues",
        )

    def _decode(self, path: str, kind: type[T], content: bytes) -> T:
        try:
            if len(content) <= MAX_BODY:
                return msgspec.json.decode(content, type=kind)
            reason = f"it has more than {MAX_BODY:,} bytes"
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            reason = str(error)
        raise ServerError(
            f"{self.base}/{path}: the response is not in OpenAI's format: {reason}",
            hint="give the address of an OpenAI-compatible server, with /v1 if it has that",
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def base_url(url: str) -> str:
    """Return the address below which the endpoints are.

    >>> base_url("http://127.0.0.1:8000"), base_url("https://example.com/api/v1/")
    ('http://127.0.0.1:8000/v1', 'https://example.com/api/v1')
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ConfigError(f"'{url}': not the URL of a server", hint="give http://HOST:PORT")
    if parts.username or parts.password:
        raise ConfigError("URL: must not contain a password", hint="give the key with --key")
    return url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")


def _error_message(error: urllib.error.HTTPError) -> str:
    """Return the message of a response in OpenAI's format, or its beginning."""
    content = b""
    with error, suppress(OSError, http.client.HTTPException):
        content = error.read(1 << 16)
    try:
        return str(msgspec.json.decode(content)["error"]["message"])[:1000]
    except (msgspec.MsgspecError, LookupError, TypeError, RecursionError):
        return content.decode(errors="replace")[:200].strip() or str(error.reason)


def _pause(attempt: int, retry_after: str | None) -> float:
    """Return the seconds before the next attempt.

    >>> _pause(0, "3") >= 3, _pause(9, None) <= 1.5 * MAX_PAUSE_S
    (True, True)
    """
    seconds = 0.25 * 2**attempt
    if retry_after and retry_after.isascii() and retry_after.isdecimal():
        seconds = float(retry_after[:6])
    # Spread, so that rejected requests do not return all at once.
    return min(MAX_PAUSE_S, seconds) * random.uniform(1.0, 1.5)
