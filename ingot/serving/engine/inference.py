"""Inference engine: named tensors in, named tensors out, batched dynamically.

    model, signature = classifier.load("digits")
    engine = InferenceEngine(model, signature)
    engine.add_request(InferenceRequest(id=1, rows=2, inputs=(images.numpy().tobytes(),)))
    while engine.has_unfinished_requests:
        time.sleep(engine.seconds_to_step())
        for output in engine.step():
            output.tensors

The inputs of a batch are concatenated along the first dimension; `ingot.serving.engine.batcher`
decides which requests are a batch, and when. A row has the same bits in any batch.
"""

# pyright: basic
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ingot.core.errors import IngotError
from ingot.interop.signature import Signature, TensorSpec
from ingot.serving.engine.batcher import Batcher, BatchingConfig
from ingot.serving.engine.output import Output
from ingot.serving.engine.request import FinishReason, InferenceRequest
from ingot.serving.engine.stateless import StatelessEngine

MAX_BATCH_BYTES = 1 << 25
"""Maximum size of the inputs, and of the outputs, of a batch."""
_DTYPES = {
    "BOOL": torch.uint8,  # a byte other than 0 and 1 is not a valid torch.bool
    "UINT8": torch.uint8,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
}
_RECENT_STEPS = 16


class InferenceEngine(StatelessEngine[InferenceRequest]):
    """Computes a model that keeps no state.

    >>> from ingot.nn import Dense, DenseConfig
    >>> model = Dense(DenseConfig(in_features=3, hidden_dims=(), out_features=2))
    >>> x = TensorSpec(name="input", datatype="FP32", shape=(3,))
    >>> y = TensorSpec(name="logits", datatype="FP32", shape=(2,))
    >>> engine = InferenceEngine(
    ...     model, Signature(inputs=(x,), outputs=(y,)), BatchingConfig(max_queue_delay=0.0))
    >>> engine.add_request(InferenceRequest(id=1, rows=4, inputs=(bytes(48),)))
    >>> engine.add_request(InferenceRequest(id=2, rows=1, inputs=(bytes(12),)))
    >>> [(output.id, len(output.tensors[0])) for output in engine.step()]
    [(1, 32), (2, 8)]
    """

    def __init__(
        self,
        model: nn.Module,
        signature: Signature,
        config: BatchingConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock)
        self.model, self.signature = model, signature
        self.batcher = Batcher(limit_batch_size(config or BatchingConfig(), signature))
        self._device = next(model.parameters()).device
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def seconds_to_step(self) -> float:
        """Return how long the next step should wait for more requests."""
        if self._outputs:
            return 0.0
        due_at = self.batcher.due_at(max(self._step_seconds, default=0.0))
        return max(0.0, due_at - self._clock())

    def add_request(self, request: InferenceRequest) -> None:
        """Queue a request; raise an error if it can never be served."""
        super().add_request(request)
        try:
            self.batcher.add(
                request.id, rows=request.rows, now=self._clock(), deadline=request.deadline
            )
        except IngotError:
            del self._waiting[request.id]
            raise

    def abort(self, id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Finish a request early; an unknown id is ignored."""
        self.batcher.remove(id)
        super().abort(id, reason)

    def step(self) -> list[Output]:
        """Compute the next batch, due or not; return the outputs of the requests that finished."""
        begin = self._clock()
        outputs = super().step()
        self._step_seconds.append(self._clock() - begin)
        return outputs

    def _check(self, request: InferenceRequest) -> None:
        wanted = [request.rows * spec.row_bytes for spec in self.signature.inputs]
        if [len(content) for content in request.inputs] != wanted:
            raise IngotError(
                f"request {request.id}: expected inputs of {wanted} bytes",
                hint="give each input of the model with its shape",
            )

    def _next_batch(self) -> list[int]:
        return self.batcher.take()

    @torch.inference_mode()
    def _compute(self, batch: list[InferenceRequest]) -> list[Output]:
        inputs = [
            _decode(b"".join([request.inputs[index] for request in batch]), spec).to(self._device)
            for index, spec in enumerate(self.signature.inputs)
        ]
        results = self.model(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        parts = [
            [_encode(part) for part in result.cpu().split([request.rows for request in batch])]
            for result in results
        ]
        return [
            Output(request.id, finish_reason=FinishReason.STOP, tensors=tuple(tensors))
            for request, *tensors in zip(batch, *parts, strict=True)
        ]


def limit_batch_size(config: BatchingConfig, signature: Signature) -> BatchingConfig:
    """Return a config whose batches have at most `MAX_BATCH_BYTES` of inputs and outputs.

    >>> spec = TensorSpec(name="image", datatype="FP32", shape=(3, 1024, 1024))
    >>> limit_batch_size(BatchingConfig(), Signature(inputs=(spec,), outputs=())).max_batch_size
    2
    """
    sizes = [sum(spec.row_bytes for spec in side) for side in (signature.inputs, signature.outputs)]
    rows = max(1, MAX_BATCH_BYTES // max(1, *sizes))
    return BatchingConfig(
        max_batch_size=min(config.max_batch_size, rows), max_queue_delay=config.max_queue_delay
    )


def _decode(content: bytes, spec: TensorSpec) -> Tensor:
    flat = torch.frombuffer(bytearray(content), dtype=_DTYPES[spec.datatype])
    tensor = flat.view(-1, *spec.shape)
    return tensor != 0 if spec.datatype == "BOOL" else tensor


def _encode(output: Tensor) -> bytes:
    """Return the elements of an output, which are in float32."""
    return output.float().contiguous().numpy().astype("<f4", copy=False).tobytes()
