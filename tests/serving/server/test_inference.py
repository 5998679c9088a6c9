"""Inference of one response, without a server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from ingot.interop.signature import Signature, TensorSpec
from ingot.serving.engine.output import Output
from ingot.serving.engine.request import FinishReason
from ingot.serving.server.completion import RequestContext
from ingot.serving.server.inference import InferenceJob, TensorBatch, signature_of
from ingot.serving.server.metrics import Metrics
from ingot.serving.workers.replicas import ReplicaSet
from ingot.serving.workers.wire import EngineReady

SPEC = TensorSpec(name="y", datatype="FP32", shape=(2,))
SIGNATURE = Signature(inputs=(SPEC,), outputs=(SPEC,))


def ready(**fields: Any) -> EngineReady:
    sizes = dict.fromkeys(
        ("vocab_size", "max_model_len", "block_size", "num_blocks", "kv_cache_bytes"), 0
    )
    return EngineReady(model="m", kv_cache_dtype="", **sizes, **fields)


def test_signatures_of_all_models() -> None:
    assert signature_of(ready(signature=SIGNATURE, max_batch_size=9)) == (SIGNATURE, 9)
    assert signature_of(ready()) is None
    found = signature_of(ready(embedding_dim=384))
    assert found is not None
    assert (found[0].inputs[0].datatype, found[0].outputs[0].shape) == ("BYTES", (384,))


def batch(binary: bool = False) -> TensorBatch:
    context = RequestContext(
        engine=ReplicaSet(),
        tokenizer=None,  # pyright: ignore[reportArgumentType]
        metrics=Metrics(),
    )
    job = InferenceJob(model="m", id=None, rows=1, signature=SIGNATURE, outputs=[(0, binary)])
    return TensorBatch(job, (bytes(8),), context)


@pytest.mark.parametrize("binary", [False, True])
def test_outputs_become_a_response(binary: bool) -> None:
    async def run() -> None:
        one = batch(binary)
        output = Output(1, finish_reason=FinishReason.STOP, tensors=(bytes(8),))
        one.on_output(output, 0.0)
        assert one.done.done()
        assert one.finish_reason == "stop"
        response = one.response()
        size = response.headers.get("inference-header-content-length")
        assert (size is not None) is binary
        content = bytes(response.body)
        found = json.loads(content[: int(size)] if size else content)
        assert found["outputs"][0]["shape"] == [1, 2]
        one.fail(None)  # pyright: ignore[reportArgumentType]
        assert one.error is None, "it was finished"

    asyncio.run(run())


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (FinishReason.DEADLINE, 504),
        (FinishReason.FAILED, 500),
        (FinishReason.CANCELLED, 503),
    ],
)
def test_unfinished_requests_are_errors(reason: FinishReason, status: int) -> None:
    async def run() -> None:
        one = batch()
        one.on_output(Output(1, finish_reason=reason), 0.0)
        assert one.done.done()
        assert one.error is not None
        assert one.error.status == status

    asyncio.run(run())


def test_an_engine_that_is_not_ready_is_an_error() -> None:
    async def run() -> None:
        one = batch()
        one.submit()
        assert one.error is not None
        assert (one.error.status, one.error.retry_after) == (503, 2)

    asyncio.run(run())
