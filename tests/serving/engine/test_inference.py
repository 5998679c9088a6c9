"""The inference engine: rows have the same bits in any batch, of any schedule."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ingot.core.errors import IngotError
from ingot.interop.signature import Signature, TensorSpec
from ingot.nn import CNN, CNNConfig
from ingot.nn.conv import ConvNorm
from ingot.serving.engine.batcher import BatchingConfig
from ingot.serving.engine.inference import InferenceEngine
from ingot.serving.engine.output import Output
from ingot.serving.engine.request import FinishReason, InferenceRequest

SHAPE, CLASSES = (2, 7, 6), 5
MODEL = CNN.from_config(CNNConfig(in_channels=2, widths=(4, 8), num_classes=CLASSES), seed=0).eval()
IMAGES = torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(0))


def signature(datatype: str = "FP32", shape: tuple[int, ...] = SHAPE) -> Signature:
    return Signature(
        inputs=(TensorSpec(name="input", datatype=datatype, shape=shape),),
        outputs=(TensorSpec(name="logits", datatype="FP32", shape=(CLASSES,)),),
    )


def engine_of(model: Any = MODEL, clock: Any = lambda: 0.0, **options: Any) -> InferenceEngine:
    config = BatchingConfig(**{"max_batch_size": 16, "max_queue_delay": 0.005, **options})
    return InferenceEngine(model, signature(), config, clock=clock)


def request(id: int, images: Tensor = IMAGES[:1], **fields: Any) -> InferenceRequest:
    return InferenceRequest(id=id, rows=len(images), inputs=(images.numpy().tobytes(),), **fields)


def logits(output: Output) -> Tensor:
    assert output.tensors is not None, output
    return torch.frombuffer(bytearray(output.tensors[0]), dtype=torch.float32).view(-1, CLASSES)


def rows_differ(chance: random.Random, schedules: int) -> bool:
    """Whether a row has other bits in one of many random schedules than alone."""
    with torch.inference_mode():
        alone = torch.cat([MODEL(image[None]) for image in IMAGES])
    for _ in range(schedules):
        engine = engine_of(max_batch_size=chance.choice((1, 3, 16)))
        waiting, found = list[Any](), dict[int, tuple[list[int], Tensor]]()
        limit = engine.batcher.config.max_batch_size
        for id in range(12):
            rows = [chance.randrange(len(IMAGES)) for _ in range(chance.randint(1, limit))]
            waiting.append((id, rows))
        sent = dict(waiting)
        while waiting or engine.has_unfinished_requests:
            for _ in range(chance.randrange(5)):
                if waiting:
                    id, rows = waiting.pop()
                    engine.add_request(request(id, IMAGES[rows]))
            found |= {one.id: (sent[one.id], logits(one)) for one in engine.step()}
        assert found.keys() == sent.keys()
        if any(not torch.equal(alone[rows], result) for rows, result in found.values()):
            return True
    return False


def test_bits_do_not_depend_on_the_schedule() -> None:
    assert not rows_differ(random.Random(0), 8)


def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConvNorm, "forward", lambda self, x: self.norm(self.conv(x)))
    assert rows_differ(random.Random(0), 8)


def test_a_batch_waits_for_more_until_it_is_due() -> None:
    now = 0.0
    engine = engine_of(clock=lambda: now)
    assert engine.seconds_to_step() == float("inf")
    engine.add_request(request(1, IMAGES[:3]))
    assert engine.seconds_to_step() == 0.005
    now = 0.002
    engine.add_request(request(2, IMAGES[:1], deadline=0.004))
    assert engine.seconds_to_step() == pytest.approx(0.001)
    engine.add_request(request(3, IMAGES[:12]))
    assert engine.seconds_to_step() == 0.0, "the batch is full"
    assert sorted(output.id for output in engine.step()) == [1, 2, 3]
    assert engine.stats().steps == 1
    engine.add_request(request(4))
    engine.abort(4)
    assert engine.seconds_to_step() == 0.0, "its output can be sent"
    assert [output.finish_reason for output in engine.step()] == [FinishReason.CANCELLED]


def test_time_of_a_batch_is_left_before_a_deadline() -> None:
    now = 0.0

    class Slow(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            nonlocal now
            now += 0.003
            return super().forward(input)

    spec = TensorSpec(name="x", datatype="FP32", shape=(4,))
    engine = InferenceEngine(
        Slow(4, 4), Signature(inputs=(spec,), outputs=(spec,)), clock=lambda: now
    )
    engine.add_request(InferenceRequest(id=1, rows=1, inputs=(bytes(16),)))
    engine.step()
    engine.add_request(InferenceRequest(id=2, rows=1, inputs=(bytes(16),), deadline=now + 0.007))
    assert engine.seconds_to_step() == pytest.approx(0.0035)
    engine.add_request(InferenceRequest(id=3, rows=1, inputs=(bytes(16),), deadline=now + 0.004))
    assert engine.seconds_to_step() == pytest.approx(0.001)


class Echo(nn.Module):
    """Returns its input as float32, to see how it was decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.dtype = x.dtype
        return x.float()


@pytest.mark.parametrize(
    ("datatype", "values", "dtype"),
    [
        ("BOOL", np.array([0, 1, 255], "u1"), torch.bool),
        ("UINT8", np.array([0, 7, 255], "u1"), torch.uint8),
        ("INT32", np.array([0, -7, 2**23], "<i4"), torch.int32),
        ("INT64", np.array([0, -7, 2**23], "<i8"), torch.int64),
        ("FP16", np.array([0, -0.5, 65504], "<f2"), torch.float16),
        ("BF16", np.array([0, 0xBF00, 0x4780], "<u2"), torch.bfloat16),
        ("FP32", np.array([0, -0.5, 1e30], "<f4"), torch.float32),
    ],
)
def test_datatypes(datatype: str, values: Any, dtype: torch.dtype) -> None:
    spec = TensorSpec(name="x", datatype=datatype, shape=(3,))
    model = Echo()
    engine = InferenceEngine(model, Signature(inputs=(spec,), outputs=()))
    engine.add_request(InferenceRequest(id=1, rows=1, inputs=(values.tobytes(),)))
    (output,) = engine.step()
    assert output.tensors is not None
    wanted = {"BOOL": [0, 1, 1], "BF16": [0, -0.5, 65536]}.get(datatype, values.tolist())
    assert np.frombuffer(output.tensors[0], "<f4").tolist() == np.float32(wanted).tolist()
    assert model.dtype is dtype


def test_impossible_requests_are_rejected() -> None:
    engine = engine_of()
    engine.add_request(request(1))
    for bad, message in (
        (request(1), "duplicate"),
        (InferenceRequest(id=2, rows=2, inputs=(bytes(4),)), "expected inputs of"),
        (InferenceRequest(id=3, rows=1, inputs=()), "expected inputs of"),
        (InferenceRequest(id=4, rows=0, inputs=(b"",)), "1 to 16 rows"),
        (InferenceRequest(id=5, rows=-1, inputs=(b"",)), "expected inputs of"),
        (request(6, IMAGES[:17]), "1 to 16 rows"),
    ):
        with pytest.raises(IngotError, match=message):
            engine.add_request(bad)
    assert [output.id for output in engine.step()] == [1]
    assert not engine.has_unfinished_requests


def test_batches_have_a_maximum_size_in_bytes() -> None:
    engine = InferenceEngine(MODEL, signature(shape=(2, 1024, 1024)))
    assert engine.batcher.config.max_batch_size == 4
