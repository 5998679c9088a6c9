from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ingot.nn import Decoder, preset
from ingot.serving.engine.engine import Engine
from ingot.workflows import decode_speed
from ingot.workflows.decode_speed import BATCHES, DECODE_PROMPT, measure_decode_speeds


def decoder(**options: Any) -> Decoder:
    return Decoder.from_config(replace(preset("tiny"), **options), seed=0)


def test_a_deeper_model_is_slower() -> None:
    shallow, deep = measure_decode_speeds([decoder(layers=1), decoder(layers=24)])
    assert tuple(shallow) == tuple(deep) == BATCHES
    for batch_size in BATCHES:
        assert shallow[batch_size] > 2 * deep[batch_size] > 0


@pytest.mark.parametrize("max_seq_len", [DECODE_PROMPT + 6, 256])
def test_every_step_decodes_a_token_of_each_request(
    max_seq_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    class Recorder(Engine):
        def step(self) -> Any:
            outputs = super().step()
            counts.append(sum(len(output.tokens) for output in outputs))
            return outputs

    monkeypatch.setattr(decode_speed, "Engine", Recorder)
    measure_decode_speeds([decoder(max_seq_len=max_seq_len)], batches=(8,))
    assert len(counts) > 3
    assert set(counts) == {8}


def test_a_very_short_context_is_not_timed() -> None:
    assert measure_decode_speeds([decoder(max_seq_len=DECODE_PROMPT), decoder()]) == [{}, {}]
