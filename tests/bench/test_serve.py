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
from ingot.serving.simulate import SLO
from ingot.serving.workload import RequestWorkload

WORKLOAD = RequestWorkload(
    num_requests=7,
    request_rate=100.0,
    input_len=12,
    output_len=9,
    length_sigma=0.5,
    shared_prefix_ratio=0.5,
    prefix_len=5,
)
NUM_TOKENS = sum(request.max_tokens for _, request, _ in WORKLOAD.generate())


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(
        Decoder.from_config(preset("tiny"), seed=0), scheduler_config=SchedulerConfig(num_blocks=64)
    )


@pytest.mark.parametrize("clients", [None, 1, 3])
def test_engine_completes_all_requests(engine: Engine, clients: int | None) -> None:
    ended: list[int] = []
    records = run_on_engine(engine, Load(workload=WORKLOAD, clients=clients), ended.append)
    assert [r.finish_reason for r in records] == ["length"] * 7
    assert [r.tokens for r in records] == [r.max_tokens for r in records]
    assert sum(ended) == 7
    assert sum(r.tokens for r in records) == NUM_TOKENS
    assert all(r.sent < r.times[0] for r in records)
    assert not engine.has_unfinished_requests


def test_closed_loop_has_at_most_one_request_per_client(engine: Engine) -> None:
    records = run_on_engine(engine, Load(workload=WORKLOAD, clients=2))
    spans = [(r.sent, r.times[-1]) for r in records]
    for at, _ in spans:
        assert sum(begin <= at < end for begin, end in spans) <= 2


def test_cancelled_requests_free_their_blocks(engine: Engine) -> None:
    workload = RequestWorkload(
        num_requests=4,
        request_rate=1e6,
        input_len=4,
        output_len=60,
        length_sigma=0,
        cancel_ratio=1.0,
        seed=3,
    )
    records = run_on_engine(engine, Load(workload=workload))
    assert {r.finish_reason for r in records} <= {"cancelled", "length"}
    assert engine.stats().num_used_blocks == 0


def test_server_completes_all_requests(small: Path) -> None:
    with start_server(small) as (address, start):
        for clients in (None, 3):
            records = send_over_http(address, Load(workload=WORKLOAD, clients=clients))
            assert [r.finish_reason for r in records] == ["length"] * 7
            assert sum(r.tokens for r in records) == NUM_TOKENS
            assert all(1 <= len(r.times) <= r.tokens for r in records)
        cancelling = {"cancel_ratio": 1.0, "shared_prefix_ratio": 0.0, "seed": 3}
        long = RequestWorkload(
            num_requests=3,
            request_rate=1e6,
            input_len=4,
            output_len=4000,
            length_sigma=0,
            **cancelling,
        )
        ends = {r.finish_reason for r in send_over_http(address, Load(workload=long))}
        assert "cancelled" in ends <= {"cancelled", "length"}
        too_long = RequestWorkload(
            num_requests=1, input_len=5000, max_len=5000, output_len=1, length_sigma=0
        )
        (rejected,) = send_over_http(address, Load(workload=too_long))
        assert rejected.finish_reason.startswith("4")
    assert 0 < start < 60


def test_requests_to_a_missing_server_are_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    records = send_over_http(f"http://127.0.0.1:{port}", Load(workload=WORKLOAD, clients=2))
    assert [r.finish_reason for r in records] == ["lost"] * 7


def test_invalid_http_response_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def respond() -> None:
            connection, _ = listener.accept()
            connection.recv(100_000)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\nnot a chunk\r\n")
            connection.close()

        thread = threading.Thread(target=respond)
        thread.start()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        (record,) = send_over_http(address, Load(workload=RequestWorkload(num_requests=1)))
        thread.join()
    assert record.finish_reason == "lost"


@pytest.mark.parametrize("address", ["127.0.0.1:8000", "https://host", "http://"])
def test_invalid_address_is_rejected(address: str) -> None:
    with pytest.raises(ConfigError, match="not an http:// address"):
        send_over_http(address, Load(workload=WORKLOAD))


def test_summary_counts_completed_requests() -> None:
    def record(sent: float, times: list[float], reason: str = "length") -> RequestRecord:
        return RequestRecord(sent, 4, 9, array("d", times), len(times), reason)

    rounds = [
        [record(0.0, [1.0, 1.5, 2.0]), record(0.0, [0.1, 0.2]), record(0.5, [], "429")],
        [record(10.0, [10.5, 11.0])],
    ]
    report = summarize(rounds, SLO(ttft=0.4, tpot=0.2))
    assert report.finish_reasons == {"429": 1, "length": 3}
    assert (report.num_requests, report.output_tokens, report.duration_s) == (4, 7, 3.0)
    assert report.output_tokens_per_s == round(7 / 3, 1)
    assert report.goodput_per_s == round(1 / 3, 3)
    assert report.ttft["p50"] == 0.5
    assert output_rate(rounds[1]) == 2.0
    assert summarize([[record(0.0, [], "429")]], SLO()).ttft == {}


def test_mapped_tokens_keep_shared_prefixes() -> None:
    prompts = [
        request.prompt
        for _, request, _ in RequestWorkload(num_requests=50, shared_prefix_ratio=1.0).generate()
    ]
    heads = {prompt[:256] for prompt in prompts}
    assert len({to_model_tokens(head) for head in heads}) == len(heads) > 1
