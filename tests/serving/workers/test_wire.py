"""Frames are received as they were sent; anything else is rejected."""

from __future__ import annotations

import random
from collections.abc import Callable
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.serving.engine.output import EngineStats, Logprob, Output
from ingot.serving.engine.request import Abort, FinishReason, Request
from ingot.serving.engine.sampling_params import Grammar, SamplingParams
from ingot.serving.workers import wire
from ingot.serving.workers.wire import MAX_FRAME, Frames, WireError, frame
from tests.serving.server.messages import READY

STATS = EngineStats(**dict.fromkeys(EngineStats.__struct_fields__, 3))
TO_WORKER = [
    Request(
        id=7,
        prompt=(1, 2, 70000),
        max_tokens=3,
        deadline=12.5,
        cache_salt=b"\x00salt",
        sampling_params=SamplingParams(
            seed=-5, logit_bias=((3, -1.5),), grammar=Grammar(kind="regex", text="a|b"), logprobs=2
        ),
    ),
    Abort(7, FinishReason.CANCELLED),
]
TO_CLIENT = [
    wire.Loading("weights"),
    READY,
    wire.StepOutputs(
        [
            Output(1, (5,), num_cached_tokens=0),
            Output(
                2,
                (6, 7),
                (Logprob(6, -0.5, ((6, -0.5),)), Logprob(7, -1.0)),
                (Logprob(1, -2.0),),
                32,
                FinishReason.STOP,
            ),
        ],
        STATS,
    ),
    wire.RequestRejected(3, "it is too long", "shorten it"),
    wire.EngineFailed("no model", "give one"),
]


@given(st.data())
def test_messages_come_out_as_they_went_in_however_they_are_cut(data: st.DataObject) -> None:
    sent = [*TO_WORKER, *TO_CLIENT]
    stream = b"".join(frame(message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    frames, found = Frames(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += frames.feed(stream[start:end])
    decode = [wire.to_worker] * len(TO_WORKER) + [wire.to_client] * len(TO_CLIENT)
    assert [d(content) for d, content in zip(decode, found, strict=True)] == sent


def test_a_length_beyond_the_bound_is_refused_before_its_content_comes() -> None:
    with pytest.raises(WireError, match="at most"):
        Frames().feed(pack("<I", MAX_FRAME + 1))


def test_a_message_beyond_the_bound_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME", 10)
    with pytest.raises(WireError, match="at most 10"):
        frame(wire.Loading("a" * 20))


def test_out_of_range_request_is_rejected() -> None:
    good = frame(
        Request(id=1, prompt=(1,), max_tokens=1, sampling_params=SamplingParams(top_p=0.5))
    )[4:]
    bad = good.replace(pack(">d", 0.5), pack(">d", 1.5))
    assert bad != good
    with pytest.raises(WireError, match="top_p"):
        wire.to_worker(bad)


@pytest.mark.parametrize("decode", [wire.to_worker, wire.to_client])
def test_garbage_is_refused_and_nothing_else_happens(
    decode: Callable[[bytes], object], record_property: Callable[[str, int], None]
) -> None:
    """Random bytes, and messages with bytes changed, cut and doubled."""
    rng = random.Random(0)
    sent = [frame(message)[4:] for message in (*TO_WORKER, *TO_CLIENT)]
    refused = 0
    for turn in range(20_000):
        content = bytearray(rng.choice(sent) if turn % 4 else rng.randbytes(rng.randrange(60)))
        for _ in range(rng.randrange(4)):
            if content:
                content[rng.randrange(len(content))] = rng.randrange(256)
        content = content[: rng.randrange(len(content) + 1)] if turn % 3 == 0 else content
        try:
            decode(bytes(content))
        except WireError:
            refused += 1
    assert refused > 10_000
    record_property("strange frames", 20_000)
