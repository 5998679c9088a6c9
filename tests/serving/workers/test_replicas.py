"""Replicas: requests of an engine that is lost continue on another one, with the same bits."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from ingot.core.errors import IngotError
from ingot.serving.engine.request import FinishReason
from ingot.serving.workers.engine_client import EngineUnavailable
from ingot.serving.workers.replicas import MAX_LOSSES, MAX_STUCK, ReplicaSet
from tests.serving.conftest import Served, serving
from tests.serving.faulty import DEADLY
from tests.serving.load import LoadReport, ask
from tests.serving.scripted import (
    Answer,
    ScriptedWorker,
    adapter,
    expected,
    run,
    submit,
)


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


def complete(client: openai.OpenAI, body: dict[str, Any], begun: threading.Event) -> Any:
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
        begun.set()
        for choice in chunk.choices:
            text, scored, ended = found.setdefault(choice.index, ["", [], None])
            if choice.logprobs:
                scored += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
            found[choice.index] = [text + choice.text, scored, choice.finish_reason or ended]
    return found


def complete_all(served: Served, act: Callable[[], None] | None = None) -> list[Any]:
    """The completions of all bodies, streamed and not; `act` is called when all of them run."""
    bodies = [{**body, "stream": stream} for body in BODIES for stream in (False, True)]
    begun = threading.Event()
    with served.client() as client, ThreadPoolExecutor(len(bodies)) as pool:
        if act:  # the engines wait until the last request has arrived
            signal_all(served.workers, signal.SIGSTOP)
        asked = [pool.submit(complete, client, body, begun) for body in bodies]
        if act:
            served.wait(lambda: served.metric("ingot:requests_in_flight") >= len(bodies))
            signal_all(served.workers, signal.SIGCONT)
            assert begun.wait(60)
            act()
        return [one.result() for one in asked]


def signal_all(workers: list[int], number: int) -> None:
    for worker in workers:
        os.kill(worker, number)


@pytest.fixture(scope="module")
def undisturbed(pair: Served) -> list[Any]:
    return complete_all(pair)


@pytest.mark.parametrize("killed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_engine_is_not_noticed(pair: Served, undisturbed: list[Any], killed: int) -> None:
    assert all(len(answer[0][0]) > 200 for answer in undisturbed[1::2]), "text of streams"
    retries, workers = pair.metric("ingot:request_retries"), pair.workers
    assert len(workers) == 2

    answers = complete_all(pair, lambda: signal_all(workers[:killed], signal.SIGKILL))
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
