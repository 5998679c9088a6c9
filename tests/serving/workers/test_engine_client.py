"""The engine as the HTTP process sees it, with a worker that is a script."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from ingot.serving.engine.output import EngineStats, Output
from ingot.serving.engine.request import Abort, FinishReason, Request
from ingot.serving.engine.sampling_params import SamplingParams
from ingot.serving.workers import wire
from ingot.serving.workers.engine_client import EngineClient, Outstanding
from tests.serving.server.messages import READY

STATS = EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 1))


@dataclass(eq=False)
class Waiting:
    """A handler and its client."""

    taken: list[Output] = field(default_factory=list)
    failures: list[tuple[int, str]] = field(default_factory=list)
    flushes: int = 0
    breaks: bool = False

    @property
    def client(self) -> Waiting:
        return self

    def on_output(self, output: Output, now: float) -> None:
        if self.breaks:
            raise RuntimeError("a bug, for a test")
        self.taken.append(output)

    def on_error(self, status: int, message: str, hint: str) -> None:
        self.failures.append((status, message))

    def flush(self) -> None:
        self.flushes += 1


def run(test: Callable[[EngineClient, socket.socket], Awaitable[None]]) -> None:
    """Run a test with a connected front and the worker's end of its socket."""

    async def main() -> None:
        engine = EngineClient()
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        protocol = engine.connect()
        await asyncio.get_running_loop().create_unix_connection(lambda: protocol, sock=ours)
        with theirs:
            await test(engine, theirs)
            engine.on_worker_lost("over")
            await asyncio.sleep(0.01)

    asyncio.run(main())


async def say(worker: socket.socket, *messages: wire.ToClient) -> None:
    await asyncio.get_running_loop().sock_sendall(worker, b"".join(map(wire.frame, messages)))
    await asyncio.sleep(0.01)


IDS = count(1)


def add_request(engine: EngineClient, handler: Waiting) -> Request:
    request = Request(id=next(IDS), prompt=(1,), max_tokens=2)
    engine.add_requests([Outstanding(request, handler)])
    return request


def test_outputs_go_to_their_sinks_with_one_flush_a_step() -> None:
    async def test(engine: EngineClient, worker: socket.socket) -> None:
        await say(worker, wire.Loading("weights"))
        assert (engine.ready, engine.status) == (False, "weights")
        await say(worker, READY)
        assert engine.ready
        heard: list[tuple[str, int]] = []
        engine.on_first_token = lambda id: heard.append(("first", id))
        engine.on_finished = lambda id: heard.append(("finished", id))
        handlers = [Waiting(), Waiting()]
        asked = [add_request(engine, handler) for handler in handlers]
        sent = await asyncio.get_running_loop().sock_recv(worker, 1 << 16)
        assert [wire.to_worker(c) for c in wire.Frames().feed(sent)] == asked
        first, second = (one.id for one in asked)
        outputs = [
            Output(first, (5,)),
            Output(second, (6,), finish_reason=FinishReason.LENGTH),
            Output(99),
        ]
        await say(worker, wire.StepOutputs(outputs, STATS))
        assert [handler.flushes for handler in handlers] == [1, 1]
        assert handlers[1].taken == [outputs[1]]
        assert engine.num_outstanding == 1
        engine.abort(first, FinishReason.CANCELLED)
        sent = await asyncio.get_running_loop().sock_recv(worker, 1 << 16)
        assert wire.to_worker(wire.Frames().feed(sent)[0]) == Abort(first, FinishReason.CANCELLED)
        await say(
            worker, wire.StepOutputs([Output(first, finish_reason=FinishReason.CANCELLED)], STATS)
        )
        assert len(handlers[0].taken) == 1, "nothing is heard of one that was ended"
        engine.abort(first, FinishReason.CANCELLED)  # twice is fine
        assert heard == [
            ("first", first),
            ("first", second),
            ("finished", second),
            ("finished", first),
        ]

    run(test)


def test_one_sink_that_breaks_breaks_no_other() -> None:
    async def test(engine: EngineClient, worker: socket.socket) -> None:
        await say(worker, READY)
        broken, good = Waiting(breaks=True), Waiting()
        asked = [add_request(engine, broken), add_request(engine, good)]
        await say(worker, wire.StepOutputs([Output(one.id, (1,)) for one in asked], STATS))
        assert broken.failures[0][0] == 500
        assert len(good.taken) == 1
        assert engine.num_outstanding == 1

    run(test)


def test_rejection_reaches_its_own_request() -> None:
    async def test(engine: EngineClient, worker: socket.socket) -> None:
        await say(worker, READY)
        handler = Waiting()
        one = add_request(engine, handler)
        await say(worker, wire.RequestRejected(one.id, "too long", "shorten it"))
        assert handler.failures == [(422, "too long")]
        assert handler.flushes == 1
        assert engine.num_outstanding == 0

    run(test)


@pytest.mark.parametrize("how", ["close", "garbage", "too long", "broken"])
def test_lost_worker_hands_over_its_requests(how: str) -> None:
    async def test(engine: EngineClient, worker: socket.socket) -> None:
        await say(worker, READY)
        handlers = [Waiting() for _ in range(3)]
        asked = [add_request(engine, handler) for handler in handlers]
        await say(worker, wire.StepOutputs([Output(asked[0].id, (5, 6))], STATS))
        losses: list[tuple[list[Outstanding], str]] = []
        engine.on_lost = lambda lost, reason: losses.append((lost, reason))
        if how == "broken":
            await say(worker, wire.EngineFailed("no memory", "buy some"))
        if how in ("close", "broken"):
            worker.close()
        else:
            data = b"\4\0\0\0abcd" if how == "garbage" else b"\xff" * 8
            await asyncio.get_running_loop().sock_sendall(worker, data)
        await asyncio.wait_for(engine.disconnected.wait(), 5)
        ((lost, reason),) = losses
        assert reason == ("no memory" if how == "broken" else "the engine process died")
        assert [one.request for one in lost] == asked
        assert [one.handler for one in lost] == handlers
        assert [one.new_tokens for one in lost] == [[5, 6], [], []]
        assert not any(handler.failures for handler in handlers)
        assert (engine.ready, engine.num_outstanding, engine.info) == (False, 0, READY)

    run(test)


def test_strange_frames_from_a_worker_are_a_lost_worker_and_no_crash(
    record_property: Callable[[str, int], None],
) -> None:
    rng = random.Random(1)
    good = wire.frame(wire.StepOutputs([Output(1, (5,), finish_reason=FinishReason.STOP)], STATS))[
        4:
    ]
    count = 300

    async def test(engine: EngineClient, worker: socket.socket) -> None:
        lost = 0
        for _ in range(count):
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            protocol = engine.connect()
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda p=protocol: p, sock=ours)
            content = bytearray(good)
            for _ in range(3):
                content[rng.randrange(len(content))] = rng.randrange(256)
            with theirs:
                await loop.sock_sendall(theirs, len(content).to_bytes(4, "little") + content)
                await asyncio.sleep(0)
            await asyncio.wait_for(engine.disconnected.wait(), 5)
            lost += 1
        assert lost == count

    run(test)
    record_property("strange frames", count)


def test_a_retry_asks_only_for_what_was_not_returned() -> None:
    def retried(start: int, **returned: Any) -> Request:
        params = SamplingParams(prompt_logprobs=1, prompt_logprobs_start=start, logprobs=1)
        prompt = tuple(range(9))
        one = Outstanding(
            Request(id=1, prompt=prompt, max_tokens=5, sampling_params=params), Waiting()
        )
        for name, value in returned.items():
            setattr(one, name, value)
        one.prepare_retry()
        assert isinstance(one.request, Request)
        return one.request

    def scored(request: Request) -> tuple[int | None, int]:
        params = request.sampling_params
        return params.prompt_logprobs, params.prompt_logprobs_start

    assert scored(retried(0)) == (1, 0)
    assert scored(retried(6)) == (1, 6)
    # The first token of a prompt has none: 3 are those of tokens 1 to 3.
    assert scored(retried(0, num_prompt_logprobs=3)) == (1, 4)
    assert scored(retried(6, num_prompt_logprobs=2)) == (1, 8)
    after = retried(0, num_prompt_logprobs=8, new_tokens=[4, 3])
    assert (scored(after)[0], after.generated, after.sampling_params.logprobs) == (None, (4, 3), 1)


def test_steps_and_work_set_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock: dict[str, Any] = {"now": 100.0}
    stopped = SimpleNamespace(monotonic=lambda: clock["now"])
    monkeypatch.setattr("ingot.serving.workers.engine_client.time", stopped)

    async def test(engine: EngineClient, worker: socket.socket) -> None:
        await say(worker, READY)
        add_request(engine, Waiting())
        assert engine.last_step_at == 100.0
        clock["now"] = 105.0
        add_request(engine, Waiting())
        assert engine.last_step_at == 100.0, "more work does not make a stuck engine lively"
        await say(worker, wire.StepOutputs([], STATS))
        assert engine.last_step_at == 105.0

    run(test)
