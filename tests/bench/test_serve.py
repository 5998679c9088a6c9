"""The load generator, against a real server and against the engine."""

from __future__ import annotations

import socket
import threading
from array import array
from pathlib import Path

import pytest

from ingot.bench.serve import (
    Load,
    RequestRecord,
    output_rate,
    run_on_engine,
    send_over_http,
    start_server,
    summarize,
    to_model_tokens,
)
from ingot.core.errors import ConfigError
from ingot.nn import Decoder, preset
from ingot.serving.engine.engine import Engine
from ingot.serving.engine.scheduler import SchedulerConfig
from ingot.serving.simulate import SLO, RequestWorkload

TRACE = RequestWorkload(
    num_requests=7,
    request_rate=100.0,
    input_len=12,
    output_len=9,
    length_sigma=0.5,
    shared_prefix_ratio=0.5,
    prefix_len=5,
)
ASKED = sum(request.max_tokens for _, request, _ in TRACE.generate())


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(
        Decoder.from_config(preset("tiny"), seed=0), scheduler_config=SchedulerConfig(num_blocks=64)
    )


@pytest.mark.parametrize("clients", [None, 1, 3])
def test_an_engine_answers_all(engine: Engine, clients: int | None) -> None:
    ended: list[int] = []
    answers = run_on_engine(engine, Load(workload=TRACE, clients=clients), ended.append)
    assert [a.end for a in answers] == ["length"] * 7
    assert [a.tokens for a in answers] == [a.asked for a in answers]
    assert sum(ended) == 7
    assert sum(a.tokens for a in answers) == ASKED
    assert all(a.sent < a.times[0] for a in answers)
    assert not engine.has_unfinished_requests


def test_never_more_at_once_than_clients(engine: Engine) -> None:
    answers = run_on_engine(engine, Load(workload=TRACE, clients=2))
    spans = [(a.sent, a.times[-1]) for a in answers]
    for at, _ in spans:
        assert sum(begin <= at < end for begin, end in spans) <= 2


def test_those_who_leave_are_cancelled(engine: Engine) -> None:
    workload = RequestWorkload(
        num_requests=4,
        request_rate=1e6,
        input_len=4,
        output_len=60,
        length_sigma=0,
        cancel_ratio=1.0,
        seed=3,
    )
    answers = run_on_engine(engine, Load(workload=workload))
    assert {a.end for a in answers} <= {"cancelled", "length"}
    assert engine.stats().num_used_blocks == 0


def test_a_server_answers_all(small: Path) -> None:
    with start_server(small) as (address, start):
        for clients in (None, 3):
            answers = send_over_http(address, Load(workload=TRACE, clients=clients))
            assert [a.end for a in answers] == ["length"] * 7
            assert sum(a.tokens for a in answers) == ASKED
            assert all(1 <= len(a.times) <= a.tokens for a in answers)
        leaving = {"cancel_ratio": 1.0, "shared_prefix_ratio": 0.0, "seed": 3}
        long = RequestWorkload(
            num_requests=3,
            request_rate=1e6,
            input_len=4,
            output_len=4000,
            length_sigma=0,
            **leaving,
        )
        ends = {a.end for a in send_over_http(address, Load(workload=long))}
        assert "cancelled" in ends <= {"cancelled", "length"}
        beyond = RequestWorkload(
            num_requests=1, input_len=5000, max_len=5000, output_len=1, length_sigma=0
        )
        (refused,) = send_over_http(address, Load(workload=beyond))
        assert refused.end.startswith("4")
    assert 0 < start < 60


def test_a_server_that_is_not_there_loses_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers = send_over_http(f"http://127.0.0.1:{port}", Load(workload=TRACE, clients=2))
    assert [a.end for a in answers] == ["lost"] * 7


def test_what_is_no_http_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def talk() -> None:
            connection, _ = listener.accept()
            connection.recv(100_000)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\nnot a chunk\r\n")
            connection.close()

        thread = threading.Thread(target=talk)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        (answer,) = send_over_http(address, Load(workload=RequestWorkload(num_requests=1)))
        thread.join()
    assert answer.end == "lost"


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "https://host", "http://"])
def test_a_wrong_address_has_a_hint(address: str) -> None:
    with pytest.raises(ConfigError, match="no address"):
        send_over_http(address, Load(workload=TRACE))


def test_a_report_counts_what_was_answered() -> None:
    def answer(sent: float, times: list[float], end: str = "length") -> RequestRecord:
        return RequestRecord(sent, 4, 9, array("d", times), len(times), end)

    rounds = [
        [answer(0.0, [1.0, 1.5, 2.0]), answer(0.0, [0.1, 0.2]), answer(0.5, [], "429")],
        [answer(10.0, [10.5, 11.0])],
    ]
    found = summarize(rounds, SLO(ttft=0.4, tpot=0.2))
    assert found.finish_reasons == {"429": 1, "length": 3}
    assert (found.num_requests, found.output_tokens, found.duration_s) == (4, 7, 3.0)
    assert found.output_tokens_per_s == round(7 / 3, 1)
    assert found.goodput_per_s == round(1 / 3, 3)
    assert found.ttft["p50"] == 0.5
    assert output_rate(rounds[1]) == 2.0
    assert summarize([[answer(0.0, [], "429")]], SLO()).ttft == {}


def test_a_trace_has_the_same_prefixes_in_real_tokens() -> None:
    prompts = [
        request.prompt
        for _, request, _ in RequestWorkload(num_requests=50, shared_prefix_ratio=1.0).generate()
    ]
    heads = {prompt[:256] for prompt in prompts}
    assert len({to_model_tokens(head) for head in heads}) == len(heads) > 1
