"""The ASGI applications: the APIs of OpenAI, Anthropic and KServe for one model; the admin API."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from ingot.serving.server.errors import add_error_handlers, error_response, json_response
from ingot.serving.server.guard import RequestGuard
from ingot.serving.server.kserve import add_inference_routes
from ingot.serving.server.messages import MessagesRequest, MessagesWriter
from ingot.serving.server.metrics import EngineCollector
from ingot.serving.server.openai import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    LoadAdapterRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from ingot.serving.server.responses import ResponsesRequest, ResponsesWriter
from ingot.serving.server.service import Service

_encode = msgspec.json.Encoder().encode
_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "invalid JSON, or more tokens than the model's context"},
    401: {"description": "missing or wrong API key"},
    404: {"description": "model not found"},
    408: {"description": "the body was received too slowly"},
    413: {"description": "the body is too large"},
    415: {"description": "the content type is not application/json"},
    422: {"description": "a field is unknown or out of range"},
    429: {"description": "overloaded: retry after Retry-After"},
    500: {"description": "the engine step failed"},
    503: {"description": "loading, draining or restarting"},
    504: {"description": "request timed out"},
}


def create_app(service: Service) -> RequestGuard:
    """Return the application of the main listener."""
    app = FastAPI(title="ingot", docs_url=None, redoc_url=None, responses=_RESPONSES)
    add_error_handlers(app)
    _add_health(app, service)

    @app.post("/v1/completions", response_class=Response)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.complete(body, request.scope)

    @app.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await service.chat(body, request.scope)

    @app.post("/v1/responses", response_class=Response)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        writer = partial(ResponsesWriter, body)
        return await service.chat(body.to_chat(), request.scope, writer)

    @app.post("/v1/messages", response_class=Response)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        return await service.chat(body.to_chat(), request.scope, MessagesWriter)

    @app.post("/v1/embeddings", response_class=Response)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        return await service.embed(body, request.scope)

    @app.post("/tokenize", response_class=Response)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        return await service.tokenize(body, request.scope)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        names = (service.model, *service.engine.adapters)
        return {"object": "list", "data": [_model_card(service, name) for name in names]}

    @app.get("/v1/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        service.check_model_name(name)
        return _model_card(service, name)

    add_inference_routes(app, service)
    return RequestGuard(service, app)


def create_admin_app(
    service: Service, collector: EngineCollector, drain: Callable[[], None]
) -> FastAPI:
    """Return the application of the admin listener."""
    app = FastAPI(title="ingot admin", docs_url=None, redoc_url=None)
    add_error_handlers(app)
    _add_health(app, service)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(collector.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/drain", response_class=Response)
    async def start_draining() -> Response:
        drain()
        return json_response(202, _encode({"status": "draining"}))

    @app.post("/v1/load_lora_adapter", response_class=Response)
    async def load_lora_adapter(body: LoadAdapterRequest) -> Response:
        return await service.load_adapter(body)

    @app.post("/v1/unload_lora_adapter", response_class=Response)
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> Response:
        return await service.unload_adapter(body)

    return app


def _model_card(service: Service, name: str) -> dict[str, Any]:
    info = service.engine.info
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "ingot",
        "parent": None if name == service.model else service.model,
        "max_model_len": info.max_model_len if info else None,
    }


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/healthz", response_class=Response)
    async def healthz() -> Response:
        return json_response(200, _encode({"status": "ok"}))

    @app.get("/readyz", response_class=Response, responses={503: {"description": "not ready"}})
    async def readyz() -> Response:
        error = service.unavailable_reason()
        if error is not None:
            return error_response(error)
        return json_response(200, _encode({"status": "ready"}))
