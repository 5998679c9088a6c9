"""The worker and its socket: malformed messages do not stop it."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import pack
from typing import Any

import pytest

from ingot.core.errors import ConfigError
from ingot.interop import classifier
from ingot.nn import CNN, CNNConfig, Decoder, preset
from ingot.serving.engine.engine import Engine
from ingot.serving.engine.output import Output
from ingot.serving.engine.pooling import PoolingEngine
from ingot.serving.engine.request import Abort, FinishReason, InferenceRequest, Request
from ingot.serving.engine.sampling_params import Grammar, SamplingParams
from ingot.serving.engine.scheduler import SchedulerConfig
from ingot.serving.engine.speculate import NgramProposer
from ingot.serving.workers import wire
from ingot.serving.workers.worker import Worker, WorkerSettings, load
from ingot.workflows.embed import Embedder
from tests import models


class Other:
    """The HTTP process's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._frames = connection, wire.Frames()
        self._heard: list[wire.ToClient] = []

    def say(self, message: wire.ToWorker) -> None:
        self.socket.sendall(wire.frame(message))

    def hear(self) -> wire.ToClient:
        while not self._heard:
            data = self.socket.recv(1 << 16)
            assert data, "the worker has left"
            self._heard += [wire.to_client(content) for content in self._frames.feed(data)]
        return self._heard.pop(0)

    def outputs(self, id: int) -> list[Output]:
        """What comes for a request, up to its end."""
        found: list[Output] = []
        while True:
            message = self.hear()
            if isinstance(message, wire.StepOutputs):
                found += [output for output in message.outputs if output.id == id]
            if found and found[-1].finish_reason is not None:
                return found


@contextmanager
def working() -> Iterator[tuple[Other, Worker]]:
    """A worker in a thread; it has to leave when the socket is closed."""
    engine = Engine(
        Decoder.from_config(preset("tiny"), seed=0), scheduler_config=SchedulerConfig(num_blocks=64)
    )
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    worker = Worker(engine, theirs)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield Other(ours), worker
    finally:
        ours.close()
        thread.join(30)
        theirs.close()
    assert not thread.is_alive()
    assert engine.stats().num_used_blocks == 0 or engine.has_unfinished_requests


def tokens(other: Other, id: int) -> list[int]:
    other.say(
        Request(
            id=id, prompt=(5, 6, 7), max_tokens=8, sampling_params=SamplingParams(temperature=0.0)
        )
    )
    return [token for output in other.outputs(id) for token in output.tokens]


def test_requests_are_answered_and_ended() -> None:
    with working() as (other, _):
        first = tokens(other, 1)
        assert len(first) == 8
        other.say(Request(id=2, prompt=(1,), max_tokens=500))
        assert isinstance(other.hear(), wire.StepOutputs)
        other.say(Abort(2, FinishReason.CANCELLED))
        assert other.outputs(2)[-1].finish_reason is FinishReason.CANCELLED
        assert tokens(other, 3) == first


def test_what_can_never_run_is_refused_by_its_number() -> None:
    with working() as (other, _):
        for request in (
            Request(id=1, prompt=(999,), max_tokens=1),
            Request(id=2, prompt=(1,) * 600, max_tokens=1),
            Request(
                id=3,
                prompt=(1,),
                max_tokens=1,
                sampling_params=SamplingParams(grammar=Grammar(kind="regex", text="a")),
            ),
        ):
            other.say(request)
            refused = other.hear()
            assert isinstance(refused, wire.RequestRejected)
            assert refused.id == request.id
            assert refused.hint
        assert tokens(other, 4)


def test_abort_of_an_unknown_request_is_ignored() -> None:
    with working() as (other, _):
        other.say(Abort(77, FinishReason.CANCELLED))
        assert tokens(other, 1)


def test_strange_frames_leave_it_serving(record_property: Callable[[str, int], None]) -> None:
    """Frames with bytes changed, cut, or made up: dropped, refused or run, and never a crash."""
    rng = random.Random(0)
    good = [
        wire.frame(
            Request(
                id=10**6, prompt=(1, 2), max_tokens=3, sampling_params=SamplingParams(logprobs=3)
            )
        )[4:],
        wire.frame(Abort(10**6, FinishReason.STOP))[4:],
    ]
    with working() as (other, worker):
        first = tokens(other, 1)
        count = 3000
        for turn in range(count):
            content = bytearray(rng.choice(good) if turn % 3 else rng.randbytes(rng.randrange(80)))
            for _ in range(rng.randrange(1, 4)):
                if content:
                    content[rng.randrange(len(content))] = rng.randrange(256)
            other.socket.sendall(pack("<I", len(content)) + content)
            if turn % 50 == 0:
                assert tokens(other, 2 + turn) == first
        assert tokens(other, 10**5) == first
        assert worker.dropped > count / 2
    record_property("strange frames", count)


def test_a_stream_that_is_none_ends_it() -> None:
    engine = Engine(
        Decoder.from_config(preset("tiny"), seed=0), scheduler_config=SchedulerConfig(num_blocks=8)
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack("<I", wire.MAX_FRAME + 1))
        with pytest.raises(wire.WireError):
            Worker(engine, theirs).run()


def test_a_model_directory_is_loaded_with_its_facts(directory: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30)
        worker = load(
            WorkerSettings(directory=str(directory), kv_cache_bytes=1 << 22, speculate="ngram"),
            theirs,
        )
        assert isinstance(worker.engine, Engine)
        assert isinstance(worker.engine.proposer, NgramProposer)
        assert not worker.engine.has_unfinished_requests
        assert worker.engine.stats().num_used_blocks == 0
        other, heard = Other(ours), list[wire.ToClient]()
        while not (heard and isinstance(heard[-1], wire.EngineReady)):
            heard.append(other.hear())
        assert [type(message) for message in heard[:-1]] == [wire.Loading] * (len(heard) - 1)
        info = heard[-1]
        assert isinstance(info, wire.EngineReady)
        assert (info.model, info.vocab_size, info.max_model_len) == ("small", 256, 4096)
        assert info.num_blocks * info.block_size * 128 * 2 <= 1 << 22


def test_an_answer_too_large_for_a_frame_fails_its_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with working() as (other, _):
        tokens(other, 1)
        options = SamplingParams(prompt_logprobs=20, logprobs=20)
        request = wire.frame(
            Request(id=2, prompt=(1,) * 200, max_tokens=3, sampling_params=options)
        )
        monkeypatch.setattr(wire, "MAX_FRAME", 2000)
        other.socket.sendall(request)
        assert other.outputs(2)[-1].finish_reason is FinishReason.FAILED
        monkeypatch.undo()
        assert tokens(other, 3)


def test_a_decoder_of_sentence_transformers_computes_embeddings(tmp_path: Path) -> None:
    """As Qwen3-Embedding: what is in the directory decides, not the architecture."""
    source = models.small(tmp_path / "small")
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling/config.json").write_text('{"pooling_mode_lasttoken": true}')
    kinds = [("Transformer", ""), ("Pooling", "1_Pooling")]
    modules = [{"type": f"sentence_transformers.models.{k}", "path": path} for k, path in kinds]
    (source / "modules.json").write_text(json.dumps(modules))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = load(WorkerSettings(directory=str(source)), theirs)
        assert isinstance(worker.engine, PoolingEngine)
        worker.engine.add_request(Request(id=1, prompt=(72, 73), max_tokens=1))
        (output,) = worker.engine.step()
    expected = Embedder(source).embed([72, 73])
    assert output.embedding == expected.numpy().tobytes()


@pytest.mark.parametrize(
    "option", [{"speculate": "ngram"}, {"adapters": {"a": "b"}}, {"kv_cache_dtype": "int8"}]
)
def test_options_without_effect_on_embeddings_raise(option: Any, minilm: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ConfigError, match=next(iter(option))):
        load(WorkerSettings(directory=str(minilm), **option), theirs)


def test_deadlines_are_times_of_the_other_side(tmp_path: Path) -> None:
    directory, ahead = models.small(tmp_path / "small"), 1000.0
    ours, theirs = socket.socketpair()
    settings = WorkerSettings(directory=str(directory), engines_per_machine=8)
    with ours, theirs:
        engine = load(settings, theirs, lambda: time.monotonic() + ahead).engine
        assert isinstance(engine, Engine)
        for id, deadline in enumerate((time.monotonic() + 900, time.monotonic() + 1100)):
            engine.add_request(Request(id=id, prompt=(1,), max_tokens=1, deadline=deadline))
        ends = {output.id: output.finish_reason for output in engine.step()}
    assert ends == {0: FinishReason.DEADLINE, 1: FinishReason.LENGTH}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("digits")
    config = CNNConfig(widths=(4,), num_classes=3)
    classifier.save(CNN.from_config(config, seed=0), directory, (1, 2, 2))
    return directory


def image(id: int, rows: int = 1, **fields: Any) -> InferenceRequest:
    return InferenceRequest(id=id, rows=rows, inputs=(bytes(16 * rows),), **fields)


@pytest.mark.parametrize("option", [{"speculate": "ngram"}, {"adapters": {"a": "b"}}])
def test_options_without_effect_on_classifiers_raise(option: Any, digits: Path) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(ConfigError, match="not supported by a classifier"):
        load(WorkerSettings(directory=str(digits), **option), theirs)


def test_batches_wait_for_more_rows_but_not_for_a_deadline(digits: Path) -> None:
    settings = WorkerSettings(directory=str(digits), max_batch_size=4, max_queue_delay=10.0)
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    worker = load(settings, theirs)
    other = Other(ours)
    while not isinstance(ready := other.hear(), wire.EngineReady):
        pass
    assert (ready.max_batch_size, ready.embedding_dim) == (4, None)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        steps, start = worker.engine.stats().steps, time.monotonic()
        for id in (1, 2, 3):
            other.say(image(id))
        time.sleep(0.2)
        assert worker.engine.stats().steps == steps, "the batch waits"
        other.say(image(4))
        step = other.hear()
        assert isinstance(step, wire.StepOutputs)
        assert [output.id for output in step.outputs] == [1, 2, 3, 4], "the batch is full"
        other.say(image(5))
        other.say(image(6, deadline=time.monotonic() + 1.0))
        (output,) = other.outputs(6)
        assert output.finish_reason is FinishReason.STOP, "the deadline is met"
        other.say(image(7))
        other.say(Abort(7, FinishReason.CANCELLED))
        other.say(Request(id=8, prompt=(1,), max_tokens=1))
        rejected = other.hear()
        if isinstance(rejected, wire.StepOutputs):  # of the request that was aborted
            rejected = other.hear()
        assert isinstance(rejected, wire.RequestRejected)
        assert time.monotonic() - start < 9.0
    finally:
        ours.close()
        thread.join(30)
        theirs.close()
    assert not thread.is_alive()


def test_tensors_are_rejected_by_models_of_text() -> None:
    with working() as (other, _):
        other.say(image(1))
        assert isinstance(other.hear(), wire.RequestRejected)
