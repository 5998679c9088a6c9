"""The engine as the HTTP process sees it, with a worker that is a script."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.serving.engine.output import EngineStats, Output
from ingot.serving.engine.request import Abort, FinishReason, Request
from ingot.serving.server import wire
from ingot.serving.server.engine_client import Front

STATS = EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 1))
HELLO = wire.Hello(model="m", vocabulary=9, context=8, block_size=4, blocks=2)


@dataclass(eq=False)
class Waiting:
    """A sink and its client."""

    taken: list[Output] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    flushes: int = 0
    breaks: bool = False

    @property
    def client(self) -> Waiting:
        return self

    def take(self, output: Output, now: float) -> None:
        if self.breaks:
            raise RuntimeError("a bug, for a test")
        self.taken.append(output)

    def fail(self, status: int, what: str, hint: str) -> None:
        self.failures.append((status, what))

    def flush(self) -> None:
        self.flushes += 1


def run(test: Callable[[Front, socket.socket], Awaitable[None]]) -> None:
    """Run a test with a connected front and the worker's end of its socket."""

    async def main() -> None:
        front = Front()
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        protocol = front.connect()
        await asyncio.get_running_loop().create_unix_connection(lambda: protocol, sock=ours)
        with theirs:
            await test(front, theirs)
            front.lose("over")
            await asyncio.sleep(0.01)

    asyncio.run(main())


async def say(worker: socket.socket, *messages: wire.ToFront) -> None:
    await asyncio.get_running_loop().sock_sendall(worker, b"".join(map(wire.frame, messages)))
    await asyncio.sleep(0.01)


def request(front: Front) -> Request:
    return Request(id=front.new_id(), prompt=(1,), max_tokens=2)


def test_outputs_go_to_their_sinks_with_one_flush_a_step() -> None:
    async def test(front: Front, worker: socket.socket) -> None:
        await say(worker, wire.Loading("weights"))
        assert (front.ready, front.doing) == (False, "weights")
        refused = Waiting()
        front.add(request(front), refused)
        assert refused.failures[0][0] == 503
        await say(worker, HELLO)
        assert front.ready
        sinks = [Waiting(), Waiting()]
        asked = [request(front) for _ in sinks]
        for one, sink in zip(asked, sinks, strict=True):
            front.add(one, sink)
        sent = await asyncio.get_running_loop().sock_recv(worker, 1 << 16)
        assert [wire.to_worker(c) for c in wire.Frames().feed(sent)] == asked
        first, second = (one.id for one in asked)
        outputs = [
            Output(first, (5,)),
            Output(second, (6,), finish_reason=FinishReason.LENGTH),
            Output(99),
        ]
        await say(worker, wire.Step(outputs, STATS))
        assert [sink.flushes for sink in sinks] == [1, 1]
        assert sinks[1].taken == [outputs[1]]
        assert front.outstanding == 1
        front.end(first, FinishReason.CANCELLED)
        sent = await asyncio.get_running_loop().sock_recv(worker, 1 << 16)
        assert wire.to_worker(wire.Frames().feed(sent)[0]) == Abort(first, FinishReason.CANCELLED)
        await say(worker, wire.Step([Output(first, finish_reason=FinishReason.CANCELLED)], STATS))
        assert len(sinks[0].taken) == 1, "nothing is heard of one that was ended"
        front.end(first, FinishReason.CANCELLED)  # twice is fine

    run(test)


def test_one_sink_that_breaks_breaks_no_other() -> None:
    async def test(front: Front, worker: socket.socket) -> None:
        await say(worker, HELLO)
        broken, good = Waiting(breaks=True), Waiting()
        asked = [request(front), request(front)]
        front.add(asked[0], broken)
        front.add(asked[1], good)
        await say(worker, wire.Step([Output(one.id, (1,)) for one in asked], STATS))
        assert broken.failures[0][0] == 500
        assert len(good.taken) == 1
        assert front.outstanding == 1

    run(test)


def test_a_refusal_is_told_to_its_own() -> None:
    async def test(front: Front, worker: socket.socket) -> None:
        await say(worker, HELLO)
        sink, one = Waiting(), request(front)
        front.add(one, sink)
        await say(worker, wire.Refused(one.id, "too long", "shorten it"))
        assert sink.failures == [(422, "too long")]
        assert sink.flushes == 1
        assert front.outstanding == 0

    run(test)


@pytest.mark.parametrize("how", ["close", "garbage", "too long", "broken"])
def test_a_worker_that_is_lost_is_lost_for_everybody_at_once(how: str) -> None:
    async def test(front: Front, worker: socket.socket) -> None:
        await say(worker, HELLO)
        sinks = [Waiting() for _ in range(3)]
        for sink in sinks:
            front.add(request(front), sink)
        changes: list[bool] = []
        front.changed = lambda: changes.append(front.ready)
        if how == "broken":
            await say(worker, wire.Broken("no memory", "buy some"))
        if how in ("close", "broken"):
            worker.close()
        else:
            data = b"\4\0\0\0abcd" if how == "garbage" else b"\xff" * 8
            await asyncio.get_running_loop().sock_sendall(worker, data)
        await asyncio.wait_for(front.lost.wait(), 5)
        assert all(sink.failures[0][0] == 503 for sink in sinks)
        assert all(len(sink.failures) == sink.flushes == 1 for sink in sinks)
        assert changes == [False]
        assert front.hello is HELLO or front.hello == HELLO
        late = Waiting()
        front.add(request(front), late)
        assert late.failures

    run(test)


def test_strange_frames_from_a_worker_are_a_lost_worker_and_no_crash(
    record_property: Callable[[str, int], None],
) -> None:
    rng = random.Random(1)
    good = wire.frame(wire.Step([Output(1, (5,), finish_reason=FinishReason.STOP)], STATS))[4:]
    count = 300

    async def test(front: Front, worker: socket.socket) -> None:
        lost = 0
        for _ in range(count):
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            protocol = front.connect()
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda p=protocol: p, sock=ours)
            content = bytearray(good)
            for _ in range(3):
                content[rng.randrange(len(content))] = rng.randrange(256)
            with theirs:
                await loop.sock_sendall(theirs, len(content).to_bytes(4, "little") + content)
                await asyncio.sleep(0)
            await asyncio.wait_for(front.lost.wait(), 5)
            lost += 1
        assert lost == count

    run(test)
    record_property("strange frames", count)


def test_steps_and_work_set_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: dict[str, Any] = {"now": 100.0}
    stopped = SimpleNamespace(monotonic=lambda: clock["now"])
    monkeypatch.setattr("ingot.serving.server.engine_client.time", stopped)

    async def test(front: Front, worker: socket.socket) -> None:
        await say(worker, HELLO)
        front.add(request(front), Waiting())
        assert front.retired == 100.0
        clock["now"] = 105.0
        front.add(request(front), Waiting())
        assert front.retired == 100.0, "more work does not make a stuck engine lively"
        await say(worker, wire.Step([], STATS))
        assert front.retired == 105.0

    run(test)
