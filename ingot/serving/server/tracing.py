"""OpenTelemetry traces: a span for each request to the model, with the GenAI conventions.

The standard variables configure it: with `OTEL_EXPORTER_OTLP_ENDPOINT`, spans are sent there by
OTLP over HTTP. A span continues the trace of the request's `traceparent` header. It has numbers of
tokens, times and finish reasons, never a part of a prompt or of a reply.

A span is built when its response is complete. A thread of the SDK exports it: a slow or failing
collector costs spans, not time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from threading import Thread
from typing import TYPE_CHECKING, Any

from ingot.core.log import logger
from ingot.serving.server.asgi import Receive, Scope, Send, headers_of
from ingot.serving.server.completion import CompletionStream
from ingot.serving.server.embedding import EmbeddingBatch

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

TRACE = "ingot.trace"
"""Key of a request's `RequestTrace` in its scope, if there is one."""
SHUTDOWN_S = 3.0
"""How long the last spans may take at shutdown."""
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
_log = logger(__name__)


class RequestTrace:
    """What is known about one request for its span."""

    def __init__(self, operation: str) -> None:
        self.started_ns = time.time_ns()
        self.attributes: dict[str, Any] = {"gen_ai.operation.name": operation}
        self.first_token_ns: int | None = None
        self.failed = False
        self._started = time.monotonic()

    def record(self, completion: CompletionStream | EmbeddingBatch, aborted: bool) -> None:
        """Add the attributes of a computed response."""
        job = completion.job
        self.attributes |= {
            "gen_ai.provider.name": "ingot",
            "gen_ai.request.model": job.model,
            "gen_ai.response.model": job.model,
            "gen_ai.response.id": completion.id,
            "gen_ai.usage.input_tokens": completion.num_prompt_tokens,
        }
        if isinstance(completion, CompletionStream):
            self._record_generation(completion, "abort" if aborted else "error")
        error = completion.error
        if error is not None or aborted:
            self.attributes["error.type"] = str(error.status) if error else "client_disconnected"
            self.failed = error is not None and error.status >= 500

    def _record_generation(self, completion: CompletionStream, unfinished: str) -> None:
        job, params = completion.job, completion.job.sampling_params
        self.attributes |= {
            "gen_ai.request.max_tokens": job.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.choice.count": job.n,
            "gen_ai.request.stream": job.stream,
            "gen_ai.response.finish_reasons": [
                choice.finish_reason or unfinished for choice in completion.choices
            ],
            "gen_ai.usage.output_tokens": completion.num_generated_tokens,
            "gen_ai.usage.cache_read.input_tokens": completion.num_cached_tokens,
        }
        if completion.ttft is not None:
            self.attributes["gen_ai.response.time_to_first_chunk"] = completion.ttft
            seconds = completion.started - self._started + completion.ttft
            self.first_token_ns = self.started_ns + int(seconds * 1e9)


class TracedApp:
    """ASGI middleware that exports a span for each request to the model."""

    def __init__(self, app: Callable[..., Awaitable[None]], provider: TracerProvider) -> None:
        self._app, self._provider = app, provider
        self._tracer = provider.get_tracer("ingot")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        operation = _OPERATIONS.get(scope["path"]) if scope["type"] == "http" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        trace = scope[TRACE] = RequestTrace(operation)

        async def note_status(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                trace.attributes["http.response.status_code"] = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            self._finish(scope, trace)

    def shutdown(self) -> None:
        """Export the last spans; give up on a collector that does not respond."""
        thread = Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(SHUTDOWN_S)

    def _finish(self, scope: Scope, trace: RequestTrace) -> None:
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, StatusCode

        attributes = trace.attributes
        attributes |= {"http.request.method": scope["method"], "http.route": scope["path"]}
        status = attributes.get("http.response.status_code", 0)
        if status >= 400:
            attributes.setdefault("error.type", str(status))
        name = attributes["gen_ai.operation.name"]
        if "gen_ai.request.model" in attributes:
            name += f" {attributes['gen_ai.request.model']}"
        headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in headers_of(scope)}
        span = self._tracer.start_span(
            name,
            extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=trace.started_ns,
        )
        if trace.first_token_ns is not None:
            span.add_event("gen_ai.first_token", timestamp=trace.first_token_ns)
        if trace.failed or status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()


def start_tracing(app: Callable[..., Awaitable[None]]) -> TracedApp | None:
    """Return the application with tracing if the environment asks for it, else None."""
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get(
        "OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    if not endpoint or os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        _log.warning('no traces are sent: install OpenTelemetry with pip install "ingot[otel]"')
        return None
    logging.getLogger("opentelemetry").parent = _log  # its warnings in the format of ours
    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "ingot"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _log.info("sending traces to %s", endpoint)
    return TracedApp(app, provider)
