"""The ASGI applications: the APIs of OpenAI, Anthropic and KServe, and the admin API."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from ingot.serving.server.errors import add_error_handlers, error_response, json_response
from ingot.serving.server.gateway import Gateway
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
    user_of,
)
from ingot.serving.server.page import add_page, model_stats
from ingot.serving.server.responses import ResponsesRequest, ResponsesWriter

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


def create_app(gateway: Gateway) -> RequestGuard:
    """Return the application of the main listener."""
    app = FastAPI(title="ingot", docs_url=None, redoc_url=None, responses=_RESPONSES)
    add_error_handlers(app)
    _add_health(app, gateway)
    add_page(
        app,
        lambda: [
            model_stats(one.name, one.engine, gateway.draining) for one in gateway.deployments
        ],
    )

    @app.post("/v1/completions", response_class=Response)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        service = await gateway.find(request.scope, body.model, body.timeout, user_of(body))
        return await service.complete(body, request.scope)

    @app.post("/v1/chat/completions", response_class=Response)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        service = await gateway.find(request.scope, body.model, body.timeout, user_of(body))
        return await service.chat(body, request.scope)

    @app.post("/v1/responses", response_class=Response)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        chat, writer = body.to_chat(), partial(ResponsesWriter, body)
        service = await gateway.find(request.scope, chat.model, chat.timeout, user_of(chat))
        return await service.chat(chat, request.scope, writer)

    @app.post("/v1/messages", response_class=Response)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        chat = body.to_chat()
        service = await gateway.find(request.scope, chat.model, chat.timeout, user_of(chat))
        return await service.chat(chat, request.scope, MessagesWriter)

    @app.post("/v1/embeddings", response_class=Response)
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        service = await gateway.find(request.scope, body.model, user=user_of(body))
        return await service.embed(body, request.scope)

    @app.post("/tokenize", response_class=Response)
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        service = await gateway.find(request.scope, body.model)
        return await service.tokenize(body, request.scope)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": gateway.list_models()}

    @app.get("/v1/models/{name}")
    async def one_model(name: str) -> dict[str, Any]:
        return gateway.describe_model(name)

    add_inference_routes(app, gateway)
    return RequestGuard(gateway, app)


def create_admin_app(
    gateway: Gateway, collector: EngineCollector, drain: Callable[[], None]
) -> FastAPI:
    """Return the application of the admin listener."""
    app = FastAPI(title="ingot admin", docs_url=None, redoc_url=None)
    add_error_handlers(app)
    _add_health(app, gateway)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(collector.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/drain", response_class=Response)
    async def start_draining() -> Response:
        drain()
        return json_response(202, _encode({"status": "draining"}))

    @app.get("/releases")
    async def releases() -> dict[str, Any]:
        return gateway.fleet.describe()

    @app.post("/v1/load_lora_adapter", response_class=Response)
    async def load_lora_adapter(body: LoadAdapterRequest) -> Response:
        return await gateway.load_adapter(body)

    @app.post("/v1/unload_lora_adapter", response_class=Response)
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> Response:
        return await gateway.unload_adapter(body)

    return app


def _add_health(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/healthz", response_class=Response)
    async def healthz() -> Response:
        return json_response(200, _encode({"status": "ok"}))

    @app.get("/readyz", response_class=Response, responses={503: {"description": "not ready"}})
    async def readyz() -> Response:
        error = gateway.not_ready_reason()
        if error is not None:
            return error_response(error)
        return json_response(200, _encode({"status": "ready"}))
