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
from ingot.serving.engine.scheduler import Limits
from ingot.serving.simulate import Goal, Trace

TRACE = Trace(requests=7, rate=100.0, prompt=12, output=9, spread=0.5, shared=0.5, prefix=5)
ASKED = sum(request.max_tokens for _, request, _ in TRACE.draw())


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(Decoder.from_config(preset("tiny"), seed=0), limits=Limits(blocks=64))


@pytest.mark.parametrize("clients", [None, 1, 3])
def test_an_engine_answers_all(engine: Engine, clients: int | None) -> None:
    ended: list[int] = []
    answers = run_on_engine(engine, Load(trace=TRACE, clients=clients), ended.append)
    assert [a.end for a in answers] == ["length"] * 7
    assert [a.tokens for a in answers] == [a.asked for a in answers]
    assert sum(ended) == 7
    assert sum(a.tokens for a in answers) == ASKED
    assert all(a.sent < a.times[0] for a in answers)
    assert not engine.busy


def test_never_more_at_once_than_clients(engine: Engine) -> None:
    answers = run_on_engine(engine, Load(trace=TRACE, clients=2))
    spans = [(a.sent, a.times[-1]) for a in answers]
    for at, _ in spans:
        assert sum(begin <= at < end for begin, end in spans) <= 2


def test_those_who_leave_are_cancelled(engine: Engine) -> None:
    trace = Trace(requests=4, rate=1e6, prompt=4, output=60, spread=0, cancelled=1.0, seed=3)
    answers = run_on_engine(engine, Load(trace=trace))
    assert {a.end for a in answers} <= {"cancelled", "length"}
    assert engine.stats().blocks_used == 0


def test_a_server_answers_all(small: Path) -> None:
    with start_server(small) as (address, start):
        for clients in (None, 3):
            answers = send_over_http(address, Load(trace=TRACE, clients=clients))
            assert [a.end for a in answers] == ["length"] * 7
            assert sum(a.tokens for a in answers) == ASKED
            assert all(1 <= len(a.times) <= a.tokens for a in answers)
        leaving = {"cancelled": 1.0, "shared": 0.0, "seed": 3}
        long = Trace(requests=3, rate=1e6, prompt=4, output=4000, spread=0, **leaving)
        ends = {a.end for a in send_over_http(address, Load(trace=long))}
        assert "cancelled" in ends <= {"cancelled", "length"}
        beyond = Trace(requests=1, prompt=5000, longest=5000, output=1, spread=0)
        (refused,) = send_over_http(address, Load(trace=beyond))
        assert refused.end.startswith("4")
    assert 0 < start < 60


def test_a_server_that_is_not_there_loses_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers = send_over_http(f"http://127.0.0.1:{port}", Load(trace=TRACE, clients=2))
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
        (answer,) = send_over_http(address, Load(trace=Trace(requests=1)))
        thread.join()
    assert answer.end == "lost"


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "https://host", "http://"])
def test_a_wrong_address_has_a_hint(address: str) -> None:
    with pytest.raises(ConfigError, match="no address"):
        send_over_http(address, Load(trace=TRACE))


def test_a_report_counts_what_was_answered() -> None:
    def answer(sent: float, times: list[float], end: str = "length") -> RequestRecord:
        return RequestRecord(sent, 4, 9, array("d", times), len(times), end)

    rounds = [
        [answer(0.0, [1.0, 1.5, 2.0]), answer(0.0, [0.1, 0.2]), answer(0.5, [], "429")],
        [answer(10.0, [10.5, 11.0])],
    ]
    found = summarize(rounds, Goal(first=0.4, between=0.2))
    assert found.ends == {"429": 1, "length": 3}
    assert (found.requests, found.output_tokens, found.seconds) == (4, 7, 3.0)
    assert found.output_tokens_per_s == round(7 / 3, 1)
    assert found.goodput_per_s == round(1 / 3, 3)
    assert found.first_token["p50"] == 0.5
    assert output_rate(rounds[1]) == 2.0
    assert summarize([[answer(0.0, [], "429")]], Goal()).first_token == {}


def test_a_trace_has_the_same_prefixes_in_real_tokens() -> None:
    prompts = [request.prompt for _, request, _ in Trace(requests=50, shared=1.0).draw()]
    heads = {prompt[:256] for prompt in prompts}
    assert len({to_model_tokens(head) for head in heads}) == len(heads) > 1
