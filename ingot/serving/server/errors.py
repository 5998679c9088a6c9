"""Errors of the HTTP API: `ApiError`, its response, and the mapping of exceptions to it."""

from __future__ import annotations

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
from ingot.serving.server.engine_client import EngineUnavailable
from ingot.serving.server.openai import error_body

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
    """Return the first violation. The input is not repeated: it may be long or private."""
    first = errors[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON", "send a JSON object")
    field = ".".join(path)
    message = f"{field}: {first['msg']}" if field else str(first["msg"])
    param = path[0] if path else None
    return ApiError(422, message[:1000], "see /openapi.json for the fields", param=param)
