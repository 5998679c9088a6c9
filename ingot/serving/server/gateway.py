"""What the requests of all models pass: API keys, draining, and the way to their model.

With one model, requests that name another one are refused, and while it loads they get 503. With
several, the `model` of a request selects a deployment or one of its adapters, and the request waits
until it is loaded.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from starlette.responses import Response

from ingot.serving.engine.adapters import check_name
from ingot.serving.fleet.deployment import Deployment
from ingot.serving.fleet.fleet import Fleet
from ingot.serving.fleet.pool import SHUTTING_DOWN
from ingot.serving.server.asgi import Scope, headers_of
from ingot.serving.server.errors import ApiError, RequestError, json_response
from ingot.serving.server.keys import ANONYMOUS, Keys, Tenant
from ingot.serving.server.openai import LoadAdapterRequest, UnloadAdapterRequest, Unprocessable
from ingot.serving.server.service import Service

VERSION = "ingot.version"
"""In the scope of a request: the version of the model that it gets."""
_encode = msgspec.json.Encoder().encode


class Gateway:
    """State of the server that its models have in common."""

    def __init__(self, fleet: Fleet, keys: Keys | None = None) -> None:
        self.fleet, self.pool, self.keys = fleet, fleet.pool, keys
        self.draining = False
        self.body_bytes = 0
        """Bytes of the bodies of all requests in flight."""
        self.statuses: Counter[int] = Counter()
        """Responses by status."""

    @property
    def deployments(self) -> tuple[Deployment, ...]:
        """The stable version of each deployment, in the order of their definition."""
        return tuple([rollout.stable for rollout in self.fleet.rollouts.values()])

    @property
    def num_requests(self) -> int:
        """Requests in flight of all models."""
        return sum(one.admission.requests for one in self.pool.deployments.values())

    def unavailable_reason(self) -> ApiError | None:
        """Return why no request can be accepted; None if requests are accepted."""
        if self.draining:
            return SHUTTING_DOWN
        if self.fleet.is_single:
            return _unavailable_reason(self.deployments[0])
        return None

    def not_ready_reason(self) -> ApiError | None:
        """Return why the server is not ready: as above, or a pinned model is not loaded."""
        reasons = [_unavailable_reason(one) for one in self.deployments if one.spec.pinned]
        return self.unavailable_reason() or next((one for one in reasons if one is not None), None)

    def loading_reason(self, model: str) -> ApiError | None:
        """Return why a model accepts no requests now: it may have to be loaded."""
        return self.unavailable_reason() or _unavailable_reason(self.resolve(model))

    def tenant(self, scope: Scope) -> Tenant | None:
        """Return the tenant of the request's API key; None if the key is missing or wrong."""
        if self.keys is None:
            return ANONYMOUS
        for name, value in headers_of(scope):
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                return self.keys.find(value[7:].strip().decode("latin-1"))
            if name == b"x-api-key":  # Anthropic's clients
                return self.keys.find(value.strip().decode("latin-1"))
        return None

    async def find(
        self, scope: Scope, model: str, timeout: float | None = None, user: str = ""
    ) -> Service:
        """Return the service of a request's model, once it is loaded.

        The `user` decides which version it is. The caller has to admit its request before it awaits
        anything else.
        """
        rollout = self.fleet.rollouts[self.resolve(model).name]
        deployment = rollout.choose(model, user and f"{scope['ingot.tenant'].name} {user}")
        await self._load(deployment, timeout)
        self.resolve(model)  # an adapter may have been unloaded meanwhile
        error = self.unavailable_reason() or _unavailable_reason(deployment)
        if error is not None:
            raise RequestError(error)
        assert deployment.service is not None
        scope[VERSION] = deployment.version
        return deployment.service

    async def _load(self, deployment: Deployment, timeout: float | None = None) -> None:
        """Wait until one of several deployments is loaded."""
        limit = deployment.spec.config.timeout
        if not self.fleet.is_single:
            await self.pool.acquire(deployment, min(timeout or limit, limit))

    def resolve(self, model: str) -> Deployment:
        """Return the deployment of a model or adapter; raise a 404 for another name."""
        if self.fleet.is_single and not model:
            return self.deployments[0]
        for one in self.deployments:
            if model == one.name or model in one.adapters:
                return one
        names = ", ".join(f"'{name}'" for name in self._names())
        message = f"model '{model}' not found" if model else "the request names no model"
        hint = f"use {names}"
        raise RequestError(ApiError(404, message, hint, param="model", code="model_not_found"))

    def list_models(self) -> list[dict[str, Any]]:
        """Return all models and adapters as `/v1/models` lists them."""
        return [_model_card(one, name) for one in self.deployments for name in _names_of(one)]

    def describe_model(self, model: str) -> dict[str, Any]:
        """Return a model or adapter as `/v1/models` lists it."""
        deployment = self.resolve(model)
        return _model_card(deployment, model)

    async def load_adapter(self, body: LoadAdapterRequest) -> Response:
        """Handle `/v1/load_lora_adapter` of the admin listener."""
        check_name(body.lora_name)
        deployment = self.resolve(body.model)
        for one in self.deployments:
            if body.lora_name == one.name:
                hint = "give the adapter another name"
                raise Unprocessable(f"'{one.name}' is the base model", hint=hint)
            if one is not deployment and body.lora_name in one.adapters:
                hint = "give the adapter another name"
                raise Unprocessable(f"'{one.name}' has an adapter of this name", hint=hint)
        with self.pool.use(deployment):
            await self._load(deployment)
            adapter = await deployment.engine.load_adapter(
                body.lora_name, body.lora_path, body.load_inplace
            )
        fields = {"id": adapter.name, "rank": adapter.rank, "sha256": adapter.digest}
        return json_response(200, _encode(fields))

    async def unload_adapter(self, body: UnloadAdapterRequest) -> Response:
        """Handle `/v1/unload_lora_adapter` of the admin listener: running requests finish."""
        owners = [one for one in self.deployments if body.lora_name in one.adapters]
        if not owners:
            message = f"adapter '{body.lora_name}' not found"
            hint = "GET /v1/models of the main listener lists the adapters"
            raise RequestError(ApiError(404, message, hint, param="lora_name"))
        (deployment,) = owners
        with self.pool.use(deployment):
            await self._load(deployment)
            await deployment.engine.unload_adapter(body.lora_name)
        return json_response(200, _encode({"id": body.lora_name}))

    def _names(self) -> list[str]:
        return [name for one in self.deployments for name in _names_of(one)]


def _names_of(deployment: Deployment) -> tuple[str, ...]:
    return (deployment.name, *deployment.adapters)


def _unavailable_reason(deployment: Deployment) -> ApiError | None:
    """Return why a deployment accepts no requests now."""
    engine = deployment.engine
    if not engine.ready:
        return ApiError(503, f"the engine is {engine.status}", "retry soon", 2)
    if engine.stalled:
        return ApiError(503, "the engine is stalled and will be restarted", "retry soon", 5)
    return None


def _model_card(deployment: Deployment, name: str) -> dict[str, Any]:
    info = deployment.engine.info
    return {
        "id": name,
        "object": "model",
        "created": deployment.created,
        "owned_by": "ingot",
        "parent": None if name == deployment.name else deployment.name,
        "max_model_len": info.max_model_len if info else None,
        "status": deployment.status,
        "pinned": deployment.spec.pinned,
    }
