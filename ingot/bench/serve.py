"""Generates load for a server and measures what its clients see: TTFT, latency, goodput.

    load = Load(workload=RequestWorkload(num_requests=256, request_rate=4.0), clients=None)
    records = send_over_http("http://127.0.0.1:8000", load)
    print(summarize([records], SLO()))

**The load** is a `RequestWorkload`, as in `ingot simulate`: the same requests can be simulated, run
on the engine and sent to a server. *Open loop*: requests are sent at the times of the workload,
however slow the server is, like those of independent users. *Closed loop*: a fixed number of
clients, each of which sends its next request when the previous one is complete; that measures
throughput.

**The client** is a few lines on asyncio's streams that count events and their times. httpx and
aiohttp parse, decode and copy more: with 32 streams on the cores of the server, they would dominate
the measurement.

All requests are streamed, greedy, and ignore EOS (`ignore_eos`). Prompts use the first 256 tokens
of the vocabulary, which every model has.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

from ingot.core.errors import ConfigError, IngotError
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.simulate import SLO, LoadReport, percentiles
from ingot.serving.workload import RequestWorkload

if TYPE_CHECKING:
    from ingot.serving.engine.engine import Engine

VOCAB_SIZE = 256
_START_TIMEOUT = 120.0  # seconds until a server has loaded its model
_SERVER_OPTIONS = ("--admin-address=127.0.0.1:0", "--log-format=json", "--max-requests=10000")
_COMPLETED = ("stop", "length")

Advance = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests, and when they are sent."""

    workload: RequestWorkload
    clients: int | None = None
    """Number of concurrent clients (closed loop); None to send at arrival times (open loop)."""

    def __post_init__(self) -> None:
        if self.clients is not None and not 1 <= self.clients <= 10_000:
            raise ConfigError(
                f"clients: must be from 1 to 10000, got {self.clients}",
                hint="choose another number for --clients",
            )


@dataclass
class RequestRecord:
    """What a client saw of a request: when it was sent, when tokens arrived, how it finished."""

    sent: float
    input_len: int
    max_tokens: int
    times: array[float] = field(default_factory=lambda: array("d"))
    tokens: int = 0
    finish_reason: str = "lost"
    """The server's (`length`, `stop`), an HTTP status, `cancelled` by the client, or `lost`."""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first."""
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1)

    @property
    def gaps(self) -> Any:
        """Seconds between tokens, as a client sees them: an event carries text, and if a character
        has several tokens, they share its time evenly.

        >>> times = array("d", [1.0, 1.4, 2.0])
        >>> one = RequestRecord(sent=0.0, input_len=8, max_tokens=5, times=times, tokens=5)
        >>> one.gaps.round(6).tolist()
        [0.2, 0.3]
        """
        gaps = np.diff(np.frombuffer(self.times))
        return gaps * min(1.0, len(gaps) / max(1, self.tokens - 1))


def summarize(rounds: Sequence[list[RequestRecord]], slo: SLO) -> LoadReport:
    """Summarize one or more rounds.

    >>> times = array("d", [0.5, 0.6, 0.7])
    >>> one = RequestRecord(sent=0.0, input_len=8, max_tokens=3, times=times, tokens=3)
    >>> one.finish_reason = "length"
    >>> report = summarize([[one]], SLO())
    >>> report.ttft["p50"], round(report.itl["p50"], 6), report.output_tokens
    (0.5, 0.1, 3)
    """
    records = [record for records in rounds for record in records]
    completed = [r for r in records if r.finish_reason in _COMPLETED and r.tokens]
    good = [r for r in completed if r.ttft <= slo.ttft and r.tpot <= slo.tpot]
    seconds = sum(map(_seconds, rounds))
    tokens = sum(r.tokens for r in records)
    gaps = [r.gaps for r in completed]
    return LoadReport(
        num_requests=len(records),
        finish_reasons=dict(sorted(Counter(r.finish_reason for r in records).items())),
        duration_s=round(seconds, 3),
        requests_per_s=round(len(completed) / seconds, 3),
        goodput_per_s=round(len(good) / seconds, 3),
        output_tokens=tokens,
        output_tokens_per_s=round(tokens / seconds, 1),
        ttft=percentiles([r.ttft for r in completed]),
        itl=percentiles(np.concatenate(gaps) if gaps else []),
        e2e=percentiles([r.times[-1] - r.sent for r in completed]),
    )


def output_rate(records: list[RequestRecord]) -> float:
    """Return the output tokens per second of a round."""
    return sum(r.tokens for r in records) / _seconds(records)


def _seconds(records: list[RequestRecord]) -> float:
    """Return the seconds from the first request to the last token."""
    begin = min((r.sent for r in records), default=0.0)
    return max([r.times[-1] - begin for r in records if r.times] or [0.0]) or 1e-9


def to_model_tokens(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Map the ids of a workload to tokens that every model has; equal ids to equal tokens.

    >>> to_model_tokens((5, 2**31, 5))[::2]
    (159, 159)
    """
    return tuple([(token * 0x9E3779B97F4A7C15 >> 32) % VOCAB_SIZE for token in prompt])


# Over HTTP


def send_over_http(
    address: str, load: Load, key: str | None = None, advance: Advance = lambda _: None
) -> list[RequestRecord]:
    """Send the load to a server; `advance` is called when a request finishes."""
    return asyncio.run(_HttpLoad(address, key, advance).run(load))


class _HttpLoad:
    """Clients of one server, with a pool of idle connections."""

    def __init__(self, address: str, key: str | None, advance: Advance) -> None:
        parts = urlsplit(address)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(
                f"'{address}': not an http:// address", hint="give one like http://127.0.0.1:8000"
            )
        self._host, self._port = parts.hostname, parts.port or 80
        lines = ["POST /v1/completions HTTP/1.1", f"Host: {parts.netloc}"]
        lines += ["Content-Type: application/json"] + [f"Authorization: Bearer {key}"] * bool(key)
        self._head = "\r\n".join(lines).encode() + b"\r\nContent-Length: "
        self._advance = advance
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._records: list[RequestRecord] = []

    async def run(self, load: Load) -> list[RequestRecord]:
        requests = load.workload.generate()
        if load.clients is None:
            await self._send_at_arrival(requests)
        else:
            await asyncio.gather(*(self._run_client(requests) for _ in range(load.clients)))
        for _, writer in self._idle:
            writer.close()
        return self._records

    async def _send_at_arrival(
        self, requests: Iterator[tuple[float, Request, float | None]]
    ) -> None:
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for arrival, request, cancel_at in requests:
                due = begin + arrival
                await asyncio.sleep(due - time.perf_counter())
                group.create_task(self._send(request, cancel_at and cancel_at - arrival, due))

    async def _run_client(self, requests: Iterator[tuple[float, Request, float | None]]) -> None:
        for arrival, request, cancel_at in requests:
            await self._send(request, cancel_at and cancel_at - arrival)

    async def _send(
        self, request: Request, cancel_at: float | None, due: float | None = None
    ) -> None:
        """Send a request; latencies are from `due` on, when it should have been sent."""
        sent = time.perf_counter() if due is None else due
        record = RequestRecord(sent, len(request.prompt), request.max_tokens)
        self._records.append(record)
        body = {
            "prompt": to_model_tokens(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            await asyncio.wait_for(self._exchange(msgspec.json.encode(body), record), cancel_at)
        except TimeoutError:
            record.finish_reason = "cancelled"
        except (OSError, asyncio.IncompleteReadError, ValueError):
            record.finish_reason = "lost"
        self._advance(1)

    async def _exchange(self, body: bytes, record: RequestRecord) -> None:
        request = self._head + str(len(body)).encode() + b"\r\n\r\n" + body
        reader, writer, head = await self._begin(request)
        done = False
        try:
            status = head.split(b" ", 2)[1].decode()
            if status == "200":
                await self._read_events(reader, record)
                done = True
            else:
                record.finish_reason = status
        finally:
            if done:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _begin(
        self, request: bytes
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
        """Send a request on an idle connection, or on a new one if the server has closed those."""
        while self._idle:
            reader, writer = self._idle.pop()
            try:
                return reader, writer, await self._send_on(reader, writer, request)
            except (ConnectionError, asyncio.IncompleteReadError):
                continue
        reader, writer = await self._connect()
        return reader, writer, await self._send_on(reader, writer, request)

    async def _send_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
    ) -> bytes:
        """Return the head of the response; close the connection if there is none."""
        try:
            writer.write(request)
            return await reader.readuntil(b"\r\n\r\n")
        except BaseException:
            writer.close()
            raise

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port)

    async def _read_events(self, reader: asyncio.StreamReader, record: RequestRecord) -> None:
        """Read the chunks of events up to the empty chunk."""
        last = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            chunk = (await reader.readexactly(size + 2))[:-2]
            now = time.perf_counter()
            texts = chunk.count(b'"text"')
            if texts and b'"finish_reason":null' in chunk:
                record.times.append(now)
            if texts < chunk.count(b"data: ") or b'"finish_reason":"' in chunk:
                last += chunk
        await reader.readexactly(2)
        _finish(record, last)


def _finish(record: RequestRecord, events: bytes) -> None:
    """Read the finish reason and the number of tokens from the last events."""
    for line in events.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        event = msgspec.json.decode(line[6:])
        for choice in event.get("choices", ()):
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
        if event.get("usage"):
            record.tokens = event["usage"]["completion_tokens"]
        if event.get("error"):
            record.finish_reason = str(event["error"].get("code") or "error")


@contextmanager
def start_server(directory: Path) -> Generator[tuple[str, float]]:
    """Run `ingot serve DIR` on a free port; yield the address and the seconds to a first token."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ingot", "serve", str(directory), "--port", str(port)]
    begin, address = time.perf_counter(), f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as output:
        server = subprocess.Popen(
            [*command, *_SERVER_OPTIONS],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            _wait_until_ready(server, address, output)
            yield address, round(time.perf_counter() - begin, 3)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _wait_until_ready(server: subprocess.Popen[bytes], address: str, output: Any) -> None:
    """Wait until the server has generated a token."""
    one = Load(
        workload=RequestWorkload(
            num_requests=1, input_len=4, output_len=1, length_sigma=0, shared_prefix_ratio=0
        )
    )
    end = time.monotonic() + _START_TIMEOUT
    while time.monotonic() < end and server.poll() is None:
        records = send_over_http(address, one)
        if records[0].finish_reason in _COMPLETED:
            return
        time.sleep(0.05)
    output.seek(0)
    text = output.read()[-2000:].decode(errors="replace")
    raise IngotError(f"the server did not start: {text}", hint="check the output of the server")


# Without HTTP


def run_on_engine(
    engine: Engine, load: Load, advance: Advance = lambda _: None
) -> list[RequestRecord]:
    """Run the load on an engine in this process: an upper bound of the server's speed."""
    return _EngineLoad(engine, load, advance).run()


class _EngineLoad:
    """Requests of a load that are running on an engine."""

    def __init__(self, engine: Engine, load: Load, advance: Advance) -> None:
        self._engine, self._load, self._advance = engine, load, advance
        self._requests = load.workload.generate()
        self._next = next(self._requests, None)
        self._open: dict[int, RequestRecord] = {}
        self._cancel_times: dict[int, float] = {}
        self._begin = time.perf_counter()

    def run(self) -> list[RequestRecord]:
        records: list[RequestRecord] = []
        while self._next or self._engine.has_unfinished_requests:
            while self._next_is_due():
                records.append(self._add())
            if not self._engine.has_unfinished_requests and self._next:
                time.sleep(max(0.0, self._begin + self._next[0] - time.perf_counter()))
                continue
            self._cancel_due()
            self._step()
        return records

    def _next_is_due(self) -> bool:
        if self._next is None:
            return False
        if self._load.clients is not None:
            return len(self._open) < self._load.clients
        return time.perf_counter() - self._begin >= self._next[0]

    def _add(self) -> RequestRecord:
        assert self._next
        arrival, request, cancel_at = self._next
        self._next = next(self._requests, None)
        now = time.perf_counter()
        record = RequestRecord(now, len(request.prompt), request.max_tokens)
        self._open[request.id] = record
        if cancel_at is not None:
            self._cancel_times[request.id] = now + cancel_at - arrival
        self._engine.add_request(
            Request(
                id=request.id,
                prompt=to_model_tokens(request.prompt),
                max_tokens=request.max_tokens,
                sampling_params=SamplingParams(temperature=0.0),
            )
        )
        return record

    def _cancel_due(self) -> None:
        now = time.perf_counter()
        for id in [id for id, when in self._cancel_times.items() if when <= now]:
            del self._cancel_times[id]
            self._engine.abort(id, FinishReason.CANCELLED)

    def _step(self) -> None:
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            record = self._open[output.id]
            if output.tokens:
                record.times.append(now)
                record.tokens += len(output.tokens)
            if output.finish_reason is not None:
                record.finish_reason = output.finish_reason.value
                del self._open[output.id]
                self._cancel_times.pop(output.id, None)
                self._advance(1)
