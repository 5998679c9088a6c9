"""Traces of a real server, received by a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from ingot.serving.server.tracing import SHUTDOWN_S, start_tracing
from tests.serving.conftest import Served, serving
from tests.serving.faulty import POISON
from tests.test_policy import modules_after

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "a secret prompt"


class Collector:
    """The spans that were received."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.content = b""
        self.respond = threading.Event()
        """While it is not set, requests hang."""
        self.respond.set()

    def receive(self, content: bytes) -> None:
        self.content += content
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            self.services.add(attributes(resource.resource)["service.name"])
            for scope in resource.scope_spans:
                self.spans += scope.spans

    def next(self) -> Span:
        """Wait for the next span."""
        deadline = time.monotonic() + 20
        while not self.spans:
            assert time.monotonic() < deadline, "no span was received"
            time.sleep(0.02)
        return self.spans.pop(0)


@contextmanager
def collecting() -> Iterator[tuple[Collector, str]]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            content = self.rfile.read(int(self.headers["content-length"]))
            collector.respond.wait()
            collector.receive(content)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield collector, f"http://127.0.0.1:{server.server_port}"
    finally:
        collector.respond.set()
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(holder: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""

    def plain(value: Any) -> Any:
        if value.HasField("array_value"):
            return [plain(one) for one in value.array_value.values]
        return getattr(value, value.WhichOneof("value"))

    return {one.key: plain(one.value) for one in holder.attributes}


@pytest.fixture(scope="module")
def traced(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, Collector]]:
    folder = tmp_path_factory.mktemp("traced")
    with collecting() as (collector, url), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with serving(directory, folder, module="tests.serving.faulty") as served:
            yield served, collector
            # A collector that does not respond delays neither requests nor the exit.
            collector.respond.clear()
            for _ in range(3):
                start = time.monotonic()
                assert served.call("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
                assert time.monotonic() - start < 2
            start = time.monotonic()
        assert time.monotonic() - start < SHUTDOWN_S + 5


def test_a_streamed_chat_is_a_span_of_its_trace(traced: tuple[Served, Collector]) -> None:
    served, collector = traced
    before = time.time_ns()
    stream = served.client().chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": SECRET}],
        max_tokens=7,
        temperature=0.5,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
        extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
        extra_body={"ignore_eos": True},
    )
    *_, last = stream
    span = collector.next()
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (span.name, span.kind) == ("chat small", Span.SPAN_KIND_SERVER)
    found = attributes(span)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ingot",
        "gen_ai.request.model": "small",
        "gen_ai.response.model": "small",
        "gen_ai.response.id": last.id,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": len(f"<user>{SECRET}<answer>"),
        "gen_ai.usage.output_tokens": 14,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert {name: found.get(name) for name in expected} == expected
    assert "error.type" not in found
    assert span.status.code == Status.STATUS_CODE_UNSET
    (event,) = span.events
    assert event.name == "gen_ai.first_token"
    assert before <= span.start_time_unix_nano < event.time_unix_nano < span.end_time_unix_nano
    ttft = found["gen_ai.response.time_to_first_chunk"]
    assert 0 < ttft <= (event.time_unix_nano - span.start_time_unix_nano) / 1e9
    assert collector.services == {"ingot"}
    assert SECRET.encode() not in collector.content


def test_rejected_failed_and_aborted_requests_have_spans(
    traced: tuple[Served, Collector],
) -> None:
    served, collector = traced
    with pytest.raises(openai.NotFoundError):
        served.client().completions.create(model="other", prompt="a")
    span = collector.next()
    found = attributes(span)
    assert (span.name, found["error.type"]) == ("text_completion", "404")
    assert span.status.code == Status.STATUS_CODE_UNSET, "the fault of the client"
    assert not span.parent_span_id

    assert served.call("/v1/completions", {"prompt": POISON})[0] == 500
    span = collector.next()
    assert (span.status.code, attributes(span)["error.type"]) == (Status.STATUS_CODE_ERROR, "500")

    body = {"prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with served.connect(body) as connection:
        connection.recv(100)
    found = attributes(collector.next())
    assert found["error.type"] == "client_disconnected"
    assert found["gen_ai.response.finish_reasons"] == ["abort"]
    assert 0 < found["gen_ai.usage.output_tokens"] < 4000


def test_only_requests_to_the_model_have_spans(traced: tuple[Served, Collector]) -> None:
    served, collector = traced
    for path in ("/", "/healthz", "/v1/models", "/v1/stats"):
        assert served.call(path)[0] == 200
    assert served.call("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
    assert collector.next().name == "text_completion small"
    assert collector.spans == []


def test_without_the_variable_nothing_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(*_: Any) -> None: ...

    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert start_tracing(app) is None
    loaded = modules_after("import ingot.serving.server.server")
    assert not any(name.startswith("opentelemetry.sdk") for name in loaded)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert start_tracing(app) is None


def test_without_the_extra_the_server_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(*_: Any) -> None: ...

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setattr("ingot.serving.server.tracing._log.propagate", True)
    assert start_tracing(app) is None
    assert 'pip install "ingot[otel]"' in caplog.text
