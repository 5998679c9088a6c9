"""Replicas whose workers do what a test says: only the other ends of their sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ingot.serving.engine.adapters import LoadedAdapter
from ingot.serving.engine.output import EngineStats, Output
from ingot.serving.engine.request import Abort, FinishReason, Request
from ingot.serving.workers import wire
from ingot.serving.workers.replicas import ReplicaSet
from ingot.serving.workers.worker import WorkerSettings
from tests.serving.server.messages import READY

STATS = EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 1))


@dataclass(eq=False)
class Answer:
    """A handler, and what it was given. All of a `group` fail together, as those of a response."""

    replicas: ReplicaSet
    request: Request
    group: list[Answer] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    flushes: int = 0

    @property
    def client(self) -> Answer:
        return self

    def on_output(self, output: Output, now: float) -> None:
        assert not self.ends, "an output after the end"
        self.tokens += output.tokens
        if output.finish_reason is not None:
            self.ends.append(output.finish_reason)

    def on_error(self, status: int, message: str, hint: str) -> None:
        self.ends.append((status, message))
        for other in self.group:
            if not other.ends:
                other.ends.append("sibling")
                self.replicas.abort(other.request.id, FinishReason.CANCELLED)

    def flush(self) -> None:
        self.flushes += 1


def next_token(request: Request, position: int) -> int:
    return (position * 31 + request.sampling_params.seed) % 9


class ScriptedWorker:
    """The other end of an engine's socket: computes when a test says so, as a worker does."""

    def __init__(self, replicas: ReplicaSet, index: int) -> None:
        self.engine = replicas.engines[index]
        self.requests: dict[int, list[Any]] = {}
        self.messages: list[Any] = []
        self._frames = wire.Frames()
        self._socket: Any = None

    async def connect(self, *adapters: LoadedAdapter) -> None:
        ours, self._socket = socket.socketpair()
        self._socket.setblocking(False)
        protocol = self.engine.connect()
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: protocol, sock=ours)
        await self.send(msgspec.structs.replace(READY, adapters=list(adapters)))

    async def send(self, *messages: wire.ToClient) -> None:
        content = b"".join(map(wire.frame, messages))
        await asyncio.get_running_loop().sock_sendall(self._socket, content)
        for _ in range(3):
            await asyncio.sleep(0)
        await asyncio.sleep(0.001)

    async def read(self) -> None:
        await asyncio.sleep(0.001)
        with contextlib.suppress(BlockingIOError):
            for content in self._frames.feed(self._socket.recv(1 << 20)):
                message = wire.to_worker(content)
                if isinstance(message, Request):
                    self.requests[message.id] = [message, list(message.tokens)]
                elif isinstance(message, Abort):
                    self.requests.pop(message.id, None)
                else:
                    self.messages.append(message)

    async def step(self) -> None:
        """A token for each request."""
        await self.read()
        outputs: list[Output] = []
        for id, (request, tokens) in list(self.requests.items()):
            tokens.append(next_token(request, len(tokens)))
            over = len(tokens) == request.max_len
            reason = FinishReason.LENGTH if over else None
            outputs.append(Output(id, (tokens[-1],), finish_reason=reason))
            if over:
                del self.requests[id]
        await self.send(wire.StepOutputs(outputs, STATS))

    async def answer_adapters(self, error: str | None = None) -> None:
        """Do, or refuse, what the last message asks for."""
        await self.read()
        message = self.messages.pop()
        adapters = dict(self.engine.adapters)
        if error is None and isinstance(message, wire.LoadAdapter):
            adapters[message.name] = adapter(message.name, message.path)
        elif error is None:
            adapters.pop(message.name)
        await self.send(wire.AdaptersChanged(message.id, [*adapters.values()], error, "hint"))

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    async def die(self) -> None:
        self.close()
        self.requests = {}
        await asyncio.wait_for(self.engine.disconnected.wait(), 5)


def adapter(name: str, directory: str) -> LoadedAdapter:
    return LoadedAdapter(name, f"digest of {directory}", 4, 0, directory)


def run(
    test: Callable[[ReplicaSet, list[ScriptedWorker]], Awaitable[None]], num_replicas: int = 2
) -> None:
    """Run a test with workers that are not connected."""

    async def main() -> None:
        replicas = ReplicaSet(num_replicas=num_replicas)
        replicas.supervise(WorkerSettings(directory="m"))
        workers = [ScriptedWorker(replicas, n) for n in range(num_replicas)]
        await test(replicas, workers)
        replicas.stop("over")
        await asyncio.sleep(0.01)
        for worker in workers:
            worker.close()

    asyncio.run(main())


def submit(replicas: ReplicaSet, max_tokens: int = 6, **fields: Any) -> Answer:
    id = replicas.new_id()
    params = {"sampling_params": {"seed": id}, **fields}
    content = {"id": id, "prompt": (1, 2, 3), "max_tokens": max_tokens, **params}
    answer = Answer(replicas, msgspec.convert({"type": "Request", **content}, Request))
    replicas.add_request(answer.request, answer)
    return answer


def expected(request: Request) -> list[int]:
    return [next_token(request, p) for p in range(len(request.prompt), request.max_len)]
