"""Replicas: requests of an engine that is lost continue on another one, with the same bits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from ingot.core.errors import IngotError
from ingot.serving.engine.adapters import LoadedAdapter
from ingot.serving.engine.output import EngineStats, Output
from ingot.serving.engine.request import Abort, FinishReason, Request
from ingot.serving.workers import wire
from ingot.serving.workers.engine_client import EngineUnavailable
from ingot.serving.workers.replicas import MAX_LOSSES, MAX_STUCK, ReplicaSet
from ingot.serving.workers.supervisor import Supervisor
from ingot.serving.workers.worker import WorkerSettings
from tests.serving.conftest import Served, serving
from tests.serving.faulty import DEADLY
from tests.serving.load import LoadReport, ask
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


def test_requests_of_a_lost_engine_continue_on_another() -> None:
    async def test(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        early = submit(replicas)
        assert early.ends[0][0] == 503
        await workers[0].connect()
        await workers[1].connect()
        answers = [submit(replicas) for _ in range(6)]
        for worker in workers:
            await worker.read()
        assert [len(worker.requests) for worker in workers] == [3, 3]
        await workers[0].step()
        await workers[0].step()
        await workers[0].die()
        assert (replicas.ready, replicas.num_ready, replicas.num_outstanding) == (True, 1, 6)
        await workers[1].read()
        given = [request.generated for request, _ in workers[1].requests.values()]
        assert sorted(map(len, given)) == [0, 0, 0, 2, 2, 2]
        assert replicas.num_retries == 3
        for _ in range(6):
            await workers[1].step()
        for answer in answers:
            assert answer.tokens == expected(answer.request)
            assert answer.ends == [FinishReason.LENGTH]
        assert replicas.num_outstanding == 0

    run(test)


def test_without_another_engine_they_wait_for_the_next_worker() -> None:
    async def test(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        (worker,) = workers
        await worker.connect()
        answers = [submit(replicas) for _ in range(3)]
        await worker.step()
        await worker.die()
        assert not replicas.ready
        assert replicas.num_outstanding == 3
        replicas.abort(answers[1].request.id, FinishReason.CANCELLED)
        assert submit(replicas).ends[0][0] == 503, "a new request is not accepted"
        await worker.connect()
        for _ in range(5):
            await worker.step()
        for answer in (answers[0], answers[2]):
            assert answer.tokens == expected(answer.request)
            assert answer.ends == [FinishReason.LENGTH]
        assert (answers[1].ends, len(answers[1].tokens)) == ([], 1)
        await worker.die()

    run(test, num_replicas=1)


@pytest.mark.parametrize("progress", [False, True])
def test_a_request_that_loses_every_engine_fails_and_its_siblings_are_aborted(
    progress: bool,
) -> None:
    async def test(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        await workers[0].connect()
        group = [submit(replicas, 40), submit(replicas, 40)]
        group[0].group = group[1].group = group
        losses = MAX_LOSSES if progress else 2
        for loss in range(losses):
            assert not group[0].ends
            await workers[1 - loss % 2].connect()
            if progress:
                await workers[loss % 2].step()
            await workers[loss % 2].die()
        while not progress and not group[0].ends:  # they are suspects: one at a time
            for worker in workers:
                if not worker.engine.ready:
                    await worker.connect()
            busy = [worker for worker in workers if worker.engine.num_outstanding]
            assert [worker.engine.num_outstanding for worker in busy] == [1]
            losses += 1
            await busy[0].die()
        assert losses <= (MAX_LOSSES if progress else 2 * MAX_STUCK - 2)
        failed = [answer for answer in group if answer.ends != ["sibling"]]
        assert len(failed) == 1
        ((status, message),) = failed[0].ends
        assert (status, message[-38:]) == (503, "as others before that had this request")
        assert failed[0].flushes == (MAX_LOSSES if progress else 0) + 1
        last = next(worker for worker in workers if worker.engine.ready)
        await last.read()
        assert not last.requests
        assert replicas.num_outstanding == 0
        fine = submit(replicas, 2)
        await last.step()
        await last.step()
        assert fine.ends == [FinishReason.LENGTH]

    run(test)


def test_a_request_that_kills_its_engine_fails_alone() -> None:
    """All run on the engine that it kills, and none of the others fails."""

    async def test(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        await workers[0].connect()
        answers = [submit(replicas, 12) for _ in range(6)]
        killer = answers[3].request.id
        kills = 0
        while replicas.num_outstanding:
            for worker in workers:
                if not worker.engine.ready:
                    await worker.connect()
                await worker.read()
                if killer in worker.requests:
                    kills += 1
                    await worker.die()
                else:
                    await worker.step()
        assert kills == MAX_STUCK
        assert [len(answer.ends) for answer in answers] == [1] * 6
        for answer in answers:
            if answer.request.id == killer:
                assert answer.ends[0][0] == 503
            else:
                assert answer.ends == [FinishReason.LENGTH]
                assert answer.tokens == expected(answer.request)

    run(test)


def test_stopping_fails_those_that_run_and_those_that_wait() -> None:
    async def test(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        await workers[0].connect()
        waiting = submit(replicas)
        await workers[0].die()
        replicas.stop("the server is stopping")
        assert waiting.ends == [(503, "the server is stopping")]
        assert waiting.flushes == 1

    run(test)

    async def running(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        await workers[0].connect()
        await workers[1].connect()
        answers = [submit(replicas) for _ in range(4)]
        replicas.stop("the server is stopping")
        assert [answer.ends for answer in answers] == [[(503, "the server is stopping")]] * 4

    run(running)


@pytest.mark.parametrize("seed", range(10))
def test_random_losses_end_each_request_once_with_its_own_tokens(seed: int) -> None:
    rng = random.Random(seed)

    async def test(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        answers: list[Answer] = []
        aborted: set[int] = set()
        for _ in range(120):
            worker, action = rng.choice(workers), rng.random()
            if action < 0.3:
                answers.append(submit(replicas, rng.randrange(1, 12)))
            elif action < 0.35 and answers:
                answer = rng.choice(answers)
                if not answer.ends:
                    aborted.add(answer.request.id)
                    replicas.abort(answer.request.id, FinishReason.CANCELLED)
            elif not worker.engine.ready:
                await worker.connect()
            elif action < 0.42:
                await worker.die()
            else:
                await worker.step()
        for worker in workers:
            if not worker.engine.ready:
                await worker.connect()
        while replicas.num_outstanding:
            for worker in workers:
                await worker.step()
        assert all(load == 0 for load in replicas._router.loads.values())  # pyright: ignore
        finished = 0
        for answer in answers:
            text = expected(answer.request)
            assert answer.tokens == text[: len(answer.tokens)]
            if answer.request.id in aborted:
                assert not answer.ends
            else:
                assert len(answer.ends) == 1
            finished += answer.ends == [FinishReason.LENGTH]
            assert (answer.ends == [FinishReason.LENGTH]) == (answer.tokens == text)
        assert finished > len(answers) / 3
        assert replicas.num_retries > 0

    run(test, num_replicas=3)


def test_a_drained_replica_finishes_its_requests_and_gets_no_others() -> None:
    async def test(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        for worker in workers:
            await worker.connect()
        answers = [submit(replicas) for _ in range(6)]
        replicas.resize(1)
        assert (replicas.num_replicas, replicas.num_ready) == (1, 1)
        answers += [submit(replicas) for _ in range(4)]
        for worker in workers:
            await worker.read()
        first, last = workers if replicas.supervisors[0] in running(replicas) else workers[::-1]
        assert (len(first.requests), len(last.requests)) == (7, 3)
        assert not any(one.is_stopping for one in replicas.supervisors.values())
        for _ in range(5):
            await last.step()
        assert last.engine.ready, "its requests are not finished"
        await last.step()
        assert not last.engine.ready, "it is stopped"
        for _ in range(6):
            await first.step()
        for answer in answers:
            assert answer.tokens == expected(answer.request)
            assert answer.ends == [FinishReason.LENGTH]
        assert replicas.num_retries == 0

    run(test)


def running(replicas: ReplicaSet) -> list[Supervisor]:
    drained = replicas._draining  # pyright: ignore[reportPrivateUsage]
    return [one for index, one in replicas.supervisors.items() if index not in drained]


def test_a_drained_replica_that_dies_is_not_started_again_and_one_may_return() -> None:
    async def test(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        for worker in workers:
            await worker.connect()
        answers = [submit(replicas) for _ in range(6)]
        replicas.resize(1)
        replicas.resize(2)
        assert replicas.num_ready == 2, "it was not stopped yet"
        replicas.resize(1)
        drained = next(i for i in (0, 1) if replicas.supervisors[i] not in running(replicas))
        await workers[drained].step()
        await workers[drained].die()
        await asyncio.sleep(0.01)
        assert replicas.supervisors[drained].is_stopping
        for _ in range(6):
            await workers[1 - drained].step()
        for answer in answers:
            assert answer.tokens == expected(answer.request)
        replicas.resize(2)
        assert replicas.num_replicas == 1, "its place is free when it has exited"

    run(test)


def test_the_load_is_how_long_requests_wait() -> None:
    async def test(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        (worker,) = workers
        await worker.connect()
        now = asyncio.get_running_loop().time()
        submit(replicas)
        await worker.step()
        sample = replicas.sample_load(now + 9)
        assert (sample.num_replicas, sample.kv_use) == (1, 1.0), "as STATS say"
        assert sample.queue_delay_s < 1
        submit(replicas)
        await worker.read()
        assert replicas.sample_load(now + 9).queue_delay_s > 7, "it still waits"
        await worker.step()
        assert replicas.sample_load(now + 9).queue_delay_s < 1
        await worker.die()

    run(test, num_replicas=1)


def test_a_stream_does_not_continue_with_another_adapter() -> None:
    async def test(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        await workers[0].connect(adapter("a", "one"))
        answers = [submit(replicas, adapter="a") for _ in range(2)]
        await workers[0].read()
        workers[0].requests.popitem()  # without a token
        await workers[0].step()
        replicas.adapters = {"a": adapter("a", "two")}
        await workers[1].connect(adapter("a", "two"))
        await workers[0].die()
        assert answers[0].ends == [(503, "adapter 'a' changed while it was used")]
        assert not answers[1].ends
        await workers[1].read()
        assert [*workers[1].requests] == [answers[1].request.id]

    run(test)


def test_adapters_are_those_of_all_replicas() -> None:
    async def test(replicas: ReplicaSet, workers: list[ScriptedWorker]) -> None:
        with pytest.raises(EngineUnavailable):
            await replicas.load_adapter("a", "one", False)
        await workers[0].connect()
        await workers[1].connect()

        async def change(coroutine: Any, *errors: str | None) -> Any:
            task = asyncio.create_task(coroutine)
            for worker, error in zip(workers, errors, strict=True):
                await worker.answer_adapters(error)
            return await task

        assert (await change(replicas.load_adapter("a", "one", False), None, None)).name == "a"
        assert list(replicas.adapters) == ["a"]
        task = asyncio.create_task(replicas.load_adapter("b", "two", False))
        await workers[0].answer_adapters()
        await workers[1].answer_adapters("no slot")
        await workers[0].answer_adapters()  # what was loaded is unloaded
        with pytest.raises(IngotError, match="no slot"):
            await task
        assert list(workers[0].engine.adapters) == list(replicas.adapters) == ["a"]
        # One that is away meanwhile gets the change before its first request.
        await workers[1].die()
        task = asyncio.create_task(replicas.load_adapter("c", "three", False))
        await workers[0].answer_adapters()
        await task
        assert list(workers[1].engine.adapters) == ["a", "c"], "for the settings of the next worker"
        await workers[1].connect(adapter("a", "one"), adapter("z", "unloaded"))
        answers = [submit(replicas, adapter="a") for _ in range(2)]
        await workers[0].read()
        assert len(workers[0].requests) == 2
        await workers[1].answer_adapters()
        await workers[1].answer_adapters()
        assert sorted(workers[1].engine.adapters) == ["a", "c"]
        submit(replicas, adapter="c")
        await workers[1].read()
        assert len(workers[1].requests) == 1
        assert not any(answer.ends for answer in answers)
        await change(replicas.unload_adapter("a"), None, None)
        assert list(replicas.adapters) == ["c"]

    run(test)


# Real processes

BODIES: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0.9, "seed": 5, "logprobs": 0},
    {"temperature": 1.2, "seed": 6, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"seed": 7, "logprobs": 1, "n": 3},
    {"seed": 8, "response_format": {"type": "regex", "regex": "[a-z ]{250,290}"}},
    {"seed": 9, "top_k": 20, "repetition_penalty": 1.3, "logprobs": 5},
]


@pytest.fixture(scope="module")
def pair(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with two replicas."""
    with serving(directory, tmp_path_factory.mktemp("server"), "--replicas", "2") as served:
        served.wait(lambda: served.metric("ingot:engine_up") == 2, 60)
        yield served


def complete(client: openai.OpenAI, body: dict[str, Any]) -> Any:
    """The choices of a completion, streamed or not, as the client of OpenAI reads them."""
    extra = {name: body[name] for name in ("top_k", "repetition_penalty") if name in body}
    known = {name: value for name, value in body.items() if name not in extra}
    known = {"model": "small", "prompt": "Hello", "max_tokens": 300, **known}
    extra["ignore_eos"] = "response_format" not in body
    if "response_format" in known:
        extra["response_format"] = known.pop("response_format")
    answer = client.completions.create(**known, extra_body=extra)
    if not body.get("stream"):
        return [choice.model_dump() for choice in answer.choices]
    found: dict[int, list[Any]] = {}
    for chunk in answer:
        for choice in chunk.choices:
            text, scored, ended = found.setdefault(choice.index, ["", [], None])
            if choice.logprobs:
                scored += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
            found[choice.index] = [text + choice.text, scored, choice.finish_reason or ended]
    return found


def complete_all(served: Served, act: Callable[[], None] = lambda: None) -> list[Any]:
    """The completions of all bodies, streamed and not; `act` is called when they run."""
    bodies = [{**body, "stream": stream} for body in BODIES for stream in (False, True)]
    with served.client() as client, ThreadPoolExecutor(len(bodies)) as pool:
        asked = [pool.submit(complete, client, body) for body in bodies]
        served.wait(lambda: served.metric("vllm:num_requests_running") >= 8)
        act()
        return [one.result() for one in asked]


@pytest.fixture(scope="module")
def undisturbed(pair: Served) -> list[Any]:
    return complete_all(pair)


@pytest.mark.parametrize("killed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_engine_is_not_noticed(pair: Served, undisturbed: list[Any], killed: int) -> None:
    assert all(len(answer[0][0]) > 200 for answer in undisturbed[1::2]), "text of streams"
    retries, workers = pair.metric("ingot:request_retries"), pair.workers
    assert len(workers) == 2

    def kill() -> None:
        for worker in workers[:killed]:
            os.kill(worker, signal.SIGKILL)

    answers = complete_all(pair, kill)
    for index, (answer, wanted) in enumerate(zip(answers, undisturbed, strict=True)):
        assert answer == wanted, BODIES[index // 2]
    assert pair.metric("ingot:request_retries") - retries >= 4 * killed
    pair.wait(lambda: pair.metric("ingot:engine_up") == 2, 60)
    pair.wait(pair.quiet)


def test_each_replica_serves_and_has_its_own_metrics(pair: Served) -> None:
    before = [pair.metric("vllm:prompt_tokens_total", engine=str(n)) for n in range(2)]

    async def ask_all() -> None:
        body = {"max_tokens": 20, "ignore_eos": True}
        await asyncio.gather(*[ask(pair, {**body, "prompt": f"{n} Hello"}) for n in range(8)])

    asyncio.run(ask_all())
    after = [pair.metric("vllm:prompt_tokens_total", engine=str(n)) for n in range(2)]
    assert all(b > a for a, b in zip(before, after, strict=True))
    page = pair.call("/metrics")[1]["text"]
    assert page.count("# TYPE vllm:num_requests_running gauge") == 1


@pytest.mark.slow
def test_a_request_that_kills_real_engines_fails_alone(directory: Path, tmp_path: Path) -> None:
    options, module = ("--replicas", "2"), "tests.serving.faulty"
    with serving(directory, tmp_path, *options, module=module) as served:
        served.wait(lambda: served.metric("ingot:engine_up") == 2, 60)
        body = {"prompt": "Hello", "max_tokens": 900, "ignore_eos": True}

        async def run(*prompts: Any) -> list[LoadReport]:
            bodies = [{**body, "seed": n, "prompt": prompt} for n, prompt in enumerate(prompts)]
            return await asyncio.gather(*[ask(served, one) for one in bodies])

        undisturbed = asyncio.run(run("a", "b", "c", "d"))
        outcomes = asyncio.run(run("a", "b", "c", "d", [*DEADLY]))
        assert [one.text for one in outcomes[:4]] == [one.text for one in undisturbed]
        assert (outcomes[4].status, outcomes[4].error) == (503, "service_unavailable_error")
        assert served.metric("ingot:engine_restarts") == MAX_STUCK
        served.wait(lambda: served.metric("ingot:engine_up") == 2, 60)
        served.wait(served.quiet)


@pytest.mark.slow
def test_20_kills_at_random_moments(
    directory: Path, tmp_path: Path, record_property: Callable[[str, float], None]
) -> None:
    """No request fails, and each has the text of an undisturbed run."""
    rng = random.Random(1)
    bodies: list[dict[str, Any]] = [
        {
            "prompt": [rng.randrange(256) for _ in range(rng.choice((2, 30, 300)))],
            "max_tokens": rng.choice((1, 20, 150, 400)),
            "temperature": rng.choice((0, 0.8)),
            "seed": n,
            "frequency_penalty": rng.choice((0, 0, 0.8)),
            "stream": n % 2 == 0,
        }
        for n in range(60)
    ]
    with serving(directory, tmp_path, "--replicas", "3") as served:
        served.wait(lambda: served.metric("ingot:engine_up") == 3, 90)

        async def ask_each(*numbers: int) -> list[LoadReport]:
            return await asyncio.gather(*[ask(served, bodies[n]) for n in numbers])

        undisturbed = asyncio.run(ask_each(*range(len(bodies))))
        killing, asked = True, 0

        async def client() -> None:
            nonlocal asked
            while killing:
                n = rng.randrange(len(bodies))
                (outcome,) = await ask_each(n)
                assert outcome.done, outcome
                assert outcome.text == undisturbed[n].text, bodies[n]
                asked += 1

        async def kill() -> None:
            nonlocal killing
            for _ in range(20):
                await asyncio.sleep(rng.uniform(0.0, 1.5))
                while await asyncio.to_thread(served.metric, "ingot:engine_up") < 2:
                    await asyncio.sleep(0.05)
                killed = await asyncio.to_thread(served.metric, "ingot:engine_restarts")
                os.kill(rng.choice(served.workers), signal.SIGKILL)
                while await asyncio.to_thread(served.metric, "ingot:engine_restarts") == killed:
                    await asyncio.sleep(0.01)
            killing = False

        async def run() -> None:
            await asyncio.gather(kill(), *[client() for _ in range(8)])

        asyncio.run(run())
        served.wait(lambda: served.metric("ingot:engine_up") == 3, 90)
        served.wait(served.quiet)
        retries = served.metric("ingot:request_retries")
        assert asked > 200
        assert retries > 20
        assert served.metric("vllm:request_success_total") == asked + len(bodies)
        record_property("requests during 20 kills", asked)
        record_property("retries", retries)
