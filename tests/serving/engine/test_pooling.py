"""The pooling engine: batches as they arrive, each embedding by itself."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ingot.core.errors import IngotError
from ingot.interop.sentence_transformers import EmbeddingConfig
from ingot.nn import BatchLayout, Decoder, Encoder, EncoderConfig, preset
from ingot.nn.pooling import Pooling, embed
from ingot.serving.engine.output import Output
from ingot.serving.engine.pooling import PoolingEngine
from ingot.serving.engine.request import FinishReason, Request

ENCODER = Encoder.from_config(
    EncoderConfig(vocab_size=97, dim=48, layers=2, heads=3, ffn_dim=80, max_seq_len=64), seed=0
)
DECODER = Decoder.from_config(preset("tiny"), seed=0)
MODELS = {"encoder": ENCODER, "decoder": DECODER}


def engine_of(model: Any = ENCODER, pooling: Pooling = Pooling.MEAN, **options: Any) -> Any:
    return PoolingEngine(model, EmbeddingConfig(pooling=pooling, max_seq_len=64), **options)


def request(id: int, length: int = 5, **fields: Any) -> Request:
    prompt = tuple(random.Random(id).choices(range(97), k=length))
    return Request(id=id, prompt=prompt, max_tokens=1, **fields)


def finish(engine: PoolingEngine) -> dict[int, Output]:
    outputs: list[Output] = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    assert len({output.id for output in outputs}) == len(outputs)
    return {output.id: output for output in outputs}


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("kind", MODELS)
def test_bits_do_not_depend_on_batch_or_order(kind: str, pooling: Pooling) -> None:
    """Requests arrive in random groups and orders, with random budgets."""
    chance, model = random.Random(f"{kind} {pooling}"), MODELS[kind]
    requests = [request(id, chance.choice((1, 2, 3, 16, 33, 64))) for id in range(20)]
    alone: dict[int, bytes | None] = {}
    for one in requests:
        with torch.inference_mode():
            layout = BatchLayout.packed([len(one.prompt)])
            row = embed(model, torch.tensor(one.prompt), layout, pooling)[0]
        assert abs(float(row.norm()) - 1) < 1e-5
        alone[one.id] = row.numpy().tobytes()
    assert len(set(alone.values())) == len(alone)
    for budget in (1, 50, 130, 4096):
        engine, waiting = engine_of(model, pooling, max_num_batched_tokens=budget), requests[:]
        chance.shuffle(waiting)
        found: dict[int, bytes | None] = {}
        while waiting or engine.has_unfinished_requests:
            for _ in range(chance.randrange(6)):
                if waiting:
                    engine.add_request(waiting.pop())
            found |= {output.id: output.embedding for output in engine.step()}
        assert found == alone


def test_waiting_requests_are_one_batch_up_to_the_budget() -> None:
    engine = engine_of(max_num_batched_tokens=30)
    for id, length in enumerate((10, 20, 1, 64, 5)):
        engine.add_request(request(id, length))
    assert engine.stats().num_waiting == 5
    assert [[o.id for o in engine.step()] for _ in range(4)] == [[0, 1], [2], [3], [4]]
    assert not engine.has_unfinished_requests
    assert (engine.stats().steps, engine.stats().prompt_tokens) == (4, 100)


def test_aborted_and_late_requests_are_not_computed() -> None:
    now = 0.0
    engine = engine_of(clock=lambda: now)
    engine.add_request(request(1))
    engine.add_request(request(2, deadline=1.0))
    engine.add_request(request(3, deadline=9.0))
    engine.abort(1)
    engine.abort(77)
    now = 1.0
    outputs = finish(engine)
    reasons = [outputs[id].finish_reason for id in (1, 2, 3)]
    assert reasons == [FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.STOP]
    assert [outputs[id].embedding is None for id in (1, 2, 3)] == [True, True, False]
    assert engine.stats().prompt_tokens == 5


def test_a_failed_step_fails_its_requests_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(max_num_batched_tokens=5)
    engine.add_request(request(1))
    engine.add_request(request(2))

    def no_memory(*_: object) -> None:
        raise MemoryError("no memory, for a test")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_compute", no_memory)
        (failed,) = engine.step()
    assert (failed.id, failed.finish_reason) == (1, FinishReason.FAILED)
    assert "no memory" in (failed.error or "")
    assert finish(engine)[2].embedding is not None
    assert engine.stats().failed_steps == 1


def test_impossible_requests_are_rejected() -> None:
    engine = engine_of()
    engine.add_request(request(1))
    for bad, message in (
        (request(1), "duplicate"),
        (request(2, 65), "64 tokens"),
        (Request(id=3, prompt=(97,), max_tokens=1), "vocabulary"),
        (request(4, adapter="pirate"), "LoRA"),
    ):
        with pytest.raises(IngotError, match=message):
            engine.add_request(bad)
    with pytest.raises(IngotError, match="LoRA"):
        engine.load_adapter("pirate", "runs/pirate")
    with pytest.raises(IngotError, match="LoRA"):
        engine.unload_adapter("pirate")
    assert list(finish(engine)) == [1]
