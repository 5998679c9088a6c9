"""The Open Inference Protocol (KServe v2) for models that keep no state.

    GET   /v2, /v2/health/live, /v2/health/ready
    GET   /v2/models/NAME, /v2/models/NAME/ready
    POST  /v2/models/NAME/infer

Errors are `{"error": "..."}`.
"""

from __future__ import annotations

import asyncio
import time
from importlib import metadata
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from ingot.interop.signature import DATATYPES, MAX_DIMENSIONS, TensorSpec
from ingot.serving.server.embedding import check_inputs, encode_inputs
from ingot.serving.server.errors import ApiError, RequestError, error_response, json_response
from ingot.serving.server.gateway import Gateway
from ingot.serving.server.inference import InferenceJob, TensorBatch, TextBatch, signature_of
from ingot.serving.server.response import EngineResponse
from ingot.serving.server.service import Service
from ingot.serving.server.tensors import (
    HEADER,
    MAX_TENSORS,
    InferenceBody,
    choose_outputs,
    count_rows,
    decode_tensors,
    decode_texts,
    split_binary,
    split_body,
)
from ingot.serving.workers.wire import EngineReady

OFFLOAD_BYTES = 1 << 14
"""Bodies from this size on are decoded in a thread."""
_encode = msgspec.json.Encoder().encode
_BODY = {
    "type": "object",
    "required": ["inputs"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "string", "maxLength": 1024},
        "parameters": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "binary_data_output": {"type": "boolean"},
                "timeout": {"type": "integer", "minimum": 0, "description": "in microseconds"},
            },
        },
        "inputs": {
            "type": "array",
            "maxItems": MAX_TENSORS,
            "items": {
                "type": "object",
                "required": ["name", "shape", "datatype"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "shape": {
                        "type": "array",
                        "items": {"type": "integer", "minimum": 0},
                        "maxItems": MAX_DIMENSIONS + 1,
                    },
                    "datatype": {"enum": list(DATATYPES)},
                    "parameters": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {"binary_data_size": {"type": "integer", "minimum": 0}},
                    },
                    "data": {"type": "array"},
                },
            },
        },
        "outputs": {
            "type": "array",
            "maxItems": MAX_TENSORS,
            "items": {
                "type": "object",
                "required": ["name"],
                "additionalProperties": False,
                "properties": {
                    "name": {"type": "string"},
                    "parameters": {
                        "type": "object",
                        "additionalProperties": False,
                        "properties": {"binary_data": {"type": "boolean"}},
                    },
                },
            },
        },
    },
}
_OPENAPI: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": _BODY}}}
}
_NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "not ready"}}


def add_inference_routes(app: FastAPI, gateway: Gateway) -> None:
    """Add the endpoints of the protocol to an application."""

    def ready(path: str, name: str | None = None) -> Response:
        error = gateway.not_ready_reason() if name is None else gateway.loading_reason(name)
        if error is not None:
            return error_response(error, path=path)
        fields = {} if name is None else {"name": name}
        return json_response(200, _encode(fields | {"ready": True}))

    @app.get("/v2")
    async def server_metadata() -> dict[str, Any]:
        version = metadata.version("ingot")
        return {"name": "ingot", "version": version, "extensions": ["binary_tensor_data"]}

    @app.get("/v2/health/live")
    async def live() -> dict[str, Any]:
        return {"live": True}

    @app.get("/v2/health/ready", response_class=Response, responses=_NOT_READY)
    async def server_ready(request: Request) -> Response:
        return ready(request.scope["path"])

    @app.get("/v2/models/{name}/ready", response_class=Response, responses=_NOT_READY)
    async def model_ready(name: str, request: Request) -> Response:
        return ready(request.scope["path"], name)

    @app.get("/v2/models/{name}")
    async def model_metadata(name: str, request: Request) -> dict[str, Any]:
        service = await gateway.find(request.scope, name)
        assert service.engine.info is not None
        return _metadata(service.engine.info, name)

    @app.post("/v2/models/{name}/infer", response_class=Response, openapi_extra=_OPENAPI)
    async def infer(name: str, request: Request) -> Response:
        return await _infer(gateway, name, request)


def _metadata(info: EngineReady, name: str) -> dict[str, Any]:
    found = signature_of(info)
    inputs, outputs = (found[0].inputs, found[0].outputs) if found else ((), ())
    return {
        "name": name,
        "versions": ["1"],
        "platform": "ingot",
        "inputs": [_describe(spec) for spec in inputs],
        "outputs": [_describe(spec) for spec in outputs],
    }


def _describe(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": [-1, *spec.shape]}


async def _infer(gateway: Gateway, name: str, request: Request) -> Response:
    gateway.resolve(name)
    body, data = split_body(await request.body(), request.headers.get(HEADER))
    timeout = body.parameters.timeout / 1e6 or None
    service = await gateway.find(request.scope, name, timeout)
    assert service.engine.info is not None
    found = signature_of(service.engine.info)
    if found is None:
        message, hint = f"'{name}' generates text", "use /v1/completions"
        raise RequestError(ApiError(400, message, hint))
    signature, max_rows = found
    rows = count_rows(body, signature, max_rows)
    outputs = choose_outputs(body, signature)
    job = InferenceJob(model=name, id=body.id, rows=rows, signature=signature, outputs=outputs)
    ticket = service.admission.acquire(
        request.scope["ingot.tenant"], requests=1, tokens=rows, now=time.monotonic()
    )
    try:
        context = service.context(ticket, service.deadline(request.scope, timeout))
        if service.engine.info.signature is None:
            ids = await asyncio.to_thread(_encode_texts, service, body, data)
            check_inputs(ids, service.engine.info)
            service.admission.correct(ticket, sum(map(len, ids)))
            batch = TextBatch(job, ids, context)
        else:
            batch = TensorBatch(job, await _decode(job, body, data), context)
        return EngineResponse(batch, ticket, admission=service.admission, metrics=service.metrics)
    except BaseException:
        service.admission.release(ticket, time.monotonic())
        raise


async def _decode(job: InferenceJob, body: InferenceBody, data: bytes) -> tuple[bytes, ...]:
    parts = split_binary(body, data)
    raw = sum(len(bytes(tensor.data)) for tensor in body.inputs)
    if raw < OFFLOAD_BYTES:
        return decode_tensors(body, parts, job.signature)
    return await asyncio.to_thread(decode_tensors, body, parts, job.signature)


def _encode_texts(service: Service, body: InferenceBody, data: bytes) -> list[tuple[int, ...]]:
    (part,) = split_binary(body, data)
    return encode_inputs(decode_texts(body.inputs[0], part), service.tokenizer)
