"""Errors of the HTTP API: `ApiError`, its response, and the mapping of exceptions to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ingot.core.errors import IngotError
from ingot.core.log import logger
from ingot.interop.chat import ChatError
from ingot.serving.server.admission import Overloaded
from ingot.serving.server.openai import error_body
from ingot.serving.workers.engine_client import EngineUnavailable

_log = logger(__name__)
_encode = msgspec.json.Encoder().encode
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


@dataclass(frozen=True)
class ApiError:
    """An error as HTTP status and body.

    >>> ApiError(429, "too many requests", "wait", 3).body()[:60]
    b'{"type":"error","error":{"message":"too many requests; wait"'
    """

    status: int
    message: str
    hint: str
    retry_after: int | None = None
    """Seconds after which to retry."""
    param: str | None = None
    code: str | None = None

    def body(self, path: str = "") -> bytes:
        """Return the error as JSON, in the form of the API that a path belongs to."""
        message = f"{self.message}; {self.hint}".encode("utf-8", "replace").decode()
        if path.startswith("/v2"):  # the Open Inference Protocol
            return _encode({"error": message})
        kind = _ERROR_TYPES.get(self.status, "server_error")
        return _encode(error_body(message, kind, param=self.param, code=self.code))


class RequestError(Exception):
    """Ends a request with an `ApiError`."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error


def json_response(status: int, body: bytes, **headers: str) -> Response:
    """Return a response whose body is JSON."""
    return Response(body, status, headers, media_type="application/json")


def error_response(error: ApiError, close: bool = False, path: str = "") -> Response:
    """Return the response for an error of a request to `path`.

    `close` the connection if the request's body was not read.
    """
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if close:
        headers["connection"] = "close"
    return json_response(error.status, error.body(path), **headers)


def add_error_handlers(app: FastAPI) -> None:
    """Map exceptions to error responses."""

    def respond(request: Request, error: ApiError) -> Response:
        return error_response(error, path=request.scope["path"])

    async def on_request_error(request: Request, error: Exception) -> Response:
        return respond(request, cast(RequestError, error).error)

    async def on_overload(request: Request, error: Exception) -> Response:
        overload = cast(Overloaded, error)
        wait = overload.retry_after
        return respond(request, ApiError(429, overload.message, overload.hint, wait))

    async def on_ingot_error(request: Request, error: Exception) -> Response:
        ingot_error = cast(IngotError, error)
        status = 400 if isinstance(error, ChatError) else 422
        status = 503 if isinstance(error, EngineUnavailable) else status
        return respond(request, ApiError(status, ingot_error.message, ingot_error.hint))

    async def on_invalid_body(request: Request, error: Exception) -> Response:
        return respond(request, _validation_error(cast(ValidationError, error).errors()))

    async def on_http_error(request: Request, error: Exception) -> Response:
        http_error = cast(HTTPException, error)
        hint = "see /openapi.json for the available endpoints"
        response = respond(request, ApiError(http_error.status_code, str(http_error.detail), hint))
        response.headers.update(http_error.headers or {})
        return response

    async def on_bug(request: Request, error: Exception) -> Response:
        _log.error("a request failed", exc_info=error)
        return respond(request, ApiError(500, "internal server error", "report this bug"))

    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(Overloaded, on_overload)
    app.add_exception_handler(IngotError, on_ingot_error)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    app.add_exception_handler(ValidationError, on_invalid_body)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)


def _validation_error(errors: Sequence[Any]) -> ApiError:
    """Return one violation. The input is not repeated: it may be long or private."""
    error = _most_specific(errors)
    if error["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", "send a JSON object")
    path = [str(part) for part in error["loc"] if part != "body" and not _is_alternative(part)]
    field = ".".join(path)
    message = f"{field}: {error['msg']}" if field else str(error["msg"])
    param = path[0] if path else None
    return ApiError(422, message[:1000], "see /openapi.json for the fields", param=param)


def _most_specific(errors: Sequence[Any]) -> Any:
    """Return the error that the client most likely means to fix.

    A value that matches no alternative of a union has the errors of all of them: the deepest, of
    the alternative that is not of another `type` and has the fewest, is the one to report.
    """
    depth = 2 if errors[0]["loc"][:1] == ("body",) else 1
    own = [error for error in errors if error["loc"][:depth] == errors[0]["loc"][:depth]]
    counts = Counter(error["loc"][:-1] for error in own)
    other_types = {
        error["loc"][:-1]
        for error in own
        if error["type"] == "literal_error" and error["loc"][-1] == "type"
    }

    def rank(error: Any) -> tuple[int, bool, int]:
        parent = error["loc"][:-1]
        return -len(error["loc"]), parent in other_types, counts[parent]

    return min(own, key=rank)


def _is_alternative(part: str | int) -> bool:
    """Return whether pydantic has named an alternative of a union, not a field."""
    return isinstance(part, str) and (part[:1].isupper() or not part.isidentifier())
