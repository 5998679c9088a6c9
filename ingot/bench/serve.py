"""A load on a server, and what its clients see: first tokens, gaps between tokens, goodput.

    load = Load(workload=RequestWorkload(num_requests=256, request_rate=4.0), clients=None)
    answers = send_over_http("http://127.0.0.1:8000", load)
    print(summarize([answers], SLO()))

**The load** is a `RequestWorkload`, as `ingot simulate` takes it: the same requests can be
simulated, given to the bare engine and sent to a server. *Open loop*: requests are sent when the
workload says. *Closed loop*: a fixed number of clients, each of which sends its next request once
the last is answered; that measures throughput.

**The client** is a few lines on asyncio's streams that count events and note when they come. httpx
and aiohttp parse, decode and copy more than that: with 32 streams on the cores that serve them they
would be most of what is measured.

All answers are streamed, greedy, and as long as asked (`ignore_eos`, as vLLM calls it). Tokens are
drawn from the first 256 of the vocabulary, which every model has.
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
from ingot.serving.simulate import SLO, LoadReport, RequestWorkload, percentiles

if TYPE_CHECKING:
    from ingot.serving.engine.engine import Engine

VOCAB_SIZE = 256
_START = 120.0  # seconds that a server may take to load
_SERVER_OPTIONS = ("--admin-address=127.0.0.1:0", "--log-format=json", "--max-requests=10000")
_ANSWERED = ("stop", "length")

Advance = Callable[[int], object]


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked, and when."""

    workload: RequestWorkload
    clients: int | None = None
    """So many ask at once, each again once it is answered; None to ask when the trace says."""

    def __post_init__(self) -> None:
        if self.clients is not None and not 1 <= self.clients <= 10_000:
            raise ConfigError(f"--clients is {self.clients}", hint="give a number from 1 to 10000")


@dataclass
class RequestRecord:
    """What became of a request: when it was sent, when its tokens came, how it ended."""

    sent: float
    prompt: int
    asked: int
    times: array[float] = field(default_factory=lambda: array("d"))
    tokens: int = 0
    end: str = "lost"
    """As the server says (`length`, `stop`), or its status; `cancelled` by us; or lost."""

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.sent

    @property
    def between(self) -> float:
        """Seconds from one token to the next, on average."""
        return (self.times[-1] - self.times[0]) / max(1, self.tokens - 1)

    @property
    def gaps(self) -> Any:
        """Seconds from one token to the next, as far as a client can tell: an event is of text, and
        where a character is of several tokens they share its time evenly.

        >>> times = array("d", [1.0, 1.4, 2.0])
        >>> one = RequestRecord(sent=0.0, prompt=8, asked=5, times=times, tokens=5)
        >>> one.gaps.round(6).tolist()
        [0.2, 0.3]
        """
        gaps = np.diff(np.frombuffer(self.times))
        return gaps * min(1.0, len(gaps) / max(1, self.tokens - 1))


def summarize(rounds: Sequence[list[RequestRecord]], slo: SLO) -> LoadReport:
    """Sum up one round or several.

    >>> times = array("d", [0.5, 0.6, 0.7])
    >>> one = RequestRecord(sent=0.0, prompt=8, asked=3, times=times, tokens=3)
    >>> one.end = "length"
    >>> found = summarize([[one]], SLO())
    >>> found.ttft["p50"], round(found.itl["p50"], 6), found.output_tokens
    (0.5, 0.1, 3)
    """
    answers = [answer for answers in rounds for answer in answers]
    good = [a for a in answers if a.end in _ANSWERED and a.tokens]
    kept = [a for a in good if a.first <= slo.ttft and a.between <= slo.tpot]
    seconds = sum(map(_seconds, rounds))
    tokens = sum(a.tokens for a in answers)
    gaps = [a.gaps for a in good]
    return LoadReport(
        num_requests=len(answers),
        finish_reasons=dict(sorted(Counter(a.end for a in answers).items())),
        duration_s=round(seconds, 3),
        requests_per_s=round(len(good) / seconds, 3),
        goodput_per_s=round(len(kept) / seconds, 3),
        output_tokens=tokens,
        output_tokens_per_s=round(tokens / seconds, 1),
        ttft=percentiles([a.first for a in good]),
        itl=percentiles(np.concatenate(gaps) if gaps else []),
        e2e=percentiles([a.times[-1] - a.sent for a in good]),
    )


def output_rate(answers: list[RequestRecord]) -> float:
    """Tokens a second of a round."""
    return sum(a.tokens for a in answers) / _seconds(answers)


def _seconds(answers: list[RequestRecord]) -> float:
    """From the first request to the last token."""
    begin = min((a.sent for a in answers), default=0.0)
    return max([a.times[-1] - begin for a in answers if a.times] or [0.0]) or 1e-9


def to_model_tokens(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that models have, in place of a trace's numbers: equal ones for equal ones.

    >>> to_model_tokens((5, 2**31, 5))[::2]
    (159, 159)
    """
    return tuple([(token * 0x9E3779B97F4A7C15 >> 32) % VOCAB_SIZE for token in prompt])


# Over HTTP


def send_over_http(
    address: str, load: Load, key: str | None = None, advance: Advance = lambda _: None
) -> list[RequestRecord]:
    """Send the load to a server; `advance` hears of each request that has ended."""
    return asyncio.run(_Sender(address, key, advance).run(load))


class _Sender:
    """Many clients of one server."""

    def __init__(self, address: str, key: str | None, advance: Advance) -> None:
        parts = urlsplit(address)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(
                f"'{address}' is no address", hint="give one as http://127.0.0.1:8000"
            )
        self._host, self._port = parts.hostname, parts.port or 80
        lines = ["POST /v1/completions HTTP/1.1", f"Host: {parts.netloc}"]
        lines += ["Content-Type: application/json"] + [f"Authorization: Bearer {key}"] * bool(key)
        self._head = "\r\n".join(lines).encode() + b"\r\nContent-Length: "
        self._advance = advance
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._answers: list[RequestRecord] = []

    async def run(self, load: Load) -> list[RequestRecord]:
        requests = load.workload.generate()
        if load.clients is None:
            await self._open(requests)
        else:
            await asyncio.gather(*(self._client(requests) for _ in range(load.clients)))
        for _, writer in self._idle:
            writer.close()
        return self._answers

    async def _open(self, requests: Iterator[tuple[float, Request, float | None]]) -> None:
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for arrival, request, leaves in requests:
                await asyncio.sleep(begin + arrival - time.perf_counter())
                group.create_task(self._ask(request, leaves and leaves - arrival))

    async def _client(self, requests: Iterator[tuple[float, Request, float | None]]) -> None:
        for arrival, request, leaves in requests:
            await self._ask(request, leaves and leaves - arrival)

    async def _ask(self, request: Request, leaves: float | None) -> None:
        answer = RequestRecord(time.perf_counter(), len(request.prompt), request.max_tokens)
        self._answers.append(answer)
        body = {
            "prompt": to_model_tokens(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            await asyncio.wait_for(self._exchange(msgspec.json.encode(body), answer), leaves)
        except TimeoutError:
            answer.end = "cancelled"
        except (OSError, asyncio.IncompleteReadError, ValueError):
            answer.end = "lost"
        self._advance(1)

    async def _exchange(self, body: bytes, answer: RequestRecord) -> None:
        reader, writer = self._idle.pop() if self._idle else await self._connect()
        done = False
        try:
            writer.write(self._head + str(len(body)).encode() + b"\r\n\r\n" + body)
            head = await reader.readuntil(b"\r\n\r\n")
            status = head.split(b" ", 2)[1].decode()
            if status == "200":
                await self._events(reader, answer)
                done = True
            else:
                answer.end = status
        finally:
            if done:
                self._idle.append((reader, writer))
            else:
                writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, self._port)

    async def _events(self, reader: asyncio.StreamReader, answer: RequestRecord) -> None:
        """Chunks of events, to the empty one."""
        last = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            chunk = (await reader.readexactly(size + 2))[:-2]
            now = time.perf_counter()
            texts = chunk.count(b'"text"')
            if texts and b'"finish_reason":null' in chunk:
                answer.times.append(now)
            if texts < chunk.count(b"data: ") or b'"finish_reason":"' in chunk:
                last += chunk
        await reader.readexactly(2)
        _finish(answer, last)


def _finish(answer: RequestRecord, events: bytes) -> None:
    """What the last events say: how it ended, and how many tokens it has."""
    for line in events.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        said = msgspec.json.decode(line[6:])
        for choice in said.get("choices", ()):
            answer.end = choice.get("finish_reason") or answer.end
        if said.get("usage"):
            answer.tokens = said["usage"]["completion_tokens"]
        if said.get("error"):
            answer.end = str(said["error"].get("code") or "error")


@contextmanager
def start_server(directory: Path) -> Generator[tuple[str, float]]:
    """`ingot serve DIR` on a free port: its address, and the seconds to its first token."""
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
            _wait(server, address, output)
            yield address, round(time.perf_counter() - begin, 3)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _wait(server: subprocess.Popen[bytes], address: str, output: Any) -> None:
    """Until it has given a token."""
    one = Load(
        workload=RequestWorkload(
            num_requests=1, input_len=4, output_len=1, length_sigma=0, shared_prefix_ratio=0
        )
    )
    end = time.monotonic() + _START
    while time.monotonic() < end and server.poll() is None:
        answers = send_over_http(address, one)
        if answers[0].end in _ANSWERED:
            return
        time.sleep(0.05)
    output.seek(0)
    said = output.read()[-2000:].decode(errors="replace")
    raise IngotError(f"the server did not start: {said}", hint="see what it said")


# Without HTTP


def run_on_engine(
    engine: Engine, load: Load, advance: Advance = lambda _: None
) -> list[RequestRecord]:
    """Give the load to an engine in this process: what the server has at most."""
    return _Feeder(engine, load, advance).run()


class _Feeder:
    def __init__(self, engine: Engine, load: Load, advance: Advance) -> None:
        self._engine, self._load, self._advance = engine, load, advance
        self._requests = load.workload.generate()
        self._next = next(self._requests, None)
        self._open: dict[int, RequestRecord] = {}
        self._leaving: dict[int, float] = {}
        self._begin = time.perf_counter()

    def run(self) -> list[RequestRecord]:
        answers: list[RequestRecord] = []
        while self._next or self._engine.has_unfinished_requests:
            while self._due():
                answers.append(self._add())
            if not self._engine.has_unfinished_requests and self._next:
                time.sleep(max(0.0, self._begin + self._next[0] - time.perf_counter()))
                continue
            self._leave()
            self._step()
        return answers

    def _due(self) -> bool:
        if self._next is None:
            return False
        if self._load.clients is not None:
            return len(self._open) < self._load.clients
        return time.perf_counter() - self._begin >= self._next[0]

    def _add(self) -> RequestRecord:
        assert self._next
        arrival, request, leaves = self._next
        self._next = next(self._requests, None)
        now = time.perf_counter()
        answer = RequestRecord(now, len(request.prompt), request.max_tokens)
        self._open[request.id] = answer
        if leaves is not None:
            self._leaving[request.id] = now + leaves - arrival
        self._engine.add_request(
            Request(
                id=request.id,
                prompt=to_model_tokens(request.prompt),
                max_tokens=request.max_tokens,
                sampling_params=SamplingParams(temperature=0.0),
            )
        )
        return answer

    def _leave(self) -> None:
        now = time.perf_counter()
        for id in [id for id, when in self._leaving.items() if when <= now]:
            del self._leaving[id]
            self._engine.abort(id, FinishReason.CANCELLED)

    def _step(self) -> None:
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            answer = self._open[output.id]
            if output.tokens:
                answer.times.append(now)
                answer.tokens += len(output.tokens)
            if output.finish_reason is not None:
                answer.end = output.finish_reason.value
                del self._open[output.id]
                self._leaving.pop(output.id, None)
                self._advance(1)
