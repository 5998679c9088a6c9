"""Inference of one HTTP response: submits tensors or texts to the engine, formats the outputs.

A request to a classifier is one request to the engine. Texts for an embedding model are those of
`/v1/embeddings`, and their embeddings have the same bits.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from ingot.interop.signature import Signature, TensorSpec
from ingot.serving.engine.output import Output
from ingot.serving.engine.request import FinishReason, InferenceRequest
from ingot.serving.server.completion import DEFAULT_RETRY_AFTER_S, FINISH_ERRORS, RequestContext
from ingot.serving.server.embedding import EmbeddingBatch, EmbeddingJob
from ingot.serving.server.errors import ApiError, json_response
from ingot.serving.server.tensors import HEADER, encode_response
from ingot.serving.workers.wire import EngineReady

MAX_TEXTS = 2048
"""Maximum number of texts of a request, as of `/v1/embeddings`."""


def signature_of(info: EngineReady) -> tuple[Signature, int] | None:
    """Return inputs and outputs of a model, and the maximum rows of a request.

    None for a model that generates text.
    """
    if info.signature is not None:
        return info.signature, info.max_batch_size
    if info.embedding_dim is None:
        return None
    text = TensorSpec(name="text", datatype="BYTES", shape=())
    embedding = TensorSpec(name="embedding", datatype="FP32", shape=(info.embedding_dim,))
    return Signature(inputs=(text,), outputs=(embedding,)), MAX_TEXTS


@dataclass(frozen=True, kw_only=True)
class InferenceJob:
    """What a request asks for, apart from its inputs."""

    model: str
    id: str | None
    """Id that the response repeats."""
    rows: int
    signature: Signature
    outputs: Sequence[tuple[int, bool]]
    """Indices of the requested outputs, and whether they are binary data."""

    def response(self, tensors: Sequence[bytes]) -> Response:
        """Return the response with these outputs."""
        fields: dict[str, Any] = {"model_name": self.model, "model_version": "1"}
        fields |= {} if self.id is None else {"id": self.id}
        content, size = encode_response(fields, self.rows, self.signature, tensors, self.outputs)
        if size is None:
            return json_response(200, content)
        return Response(content, 200, {HEADER: str(size)}, media_type="application/octet-stream")


class TextBatch(EmbeddingBatch):
    """Texts of a request to an embedding model."""

    def __init__(
        self, job: InferenceJob, inputs: list[tuple[int, ...]], context: RequestContext
    ) -> None:
        super().__init__(EmbeddingJob(model=job.model, inputs=inputs, base64=False), context)
        self._inference = job

    def response(self) -> Response:
        """Return the complete response."""
        return self._inference.response([b"".join([one.embedding or b"" for one in self.choices])])


class TensorBatch:
    """Rows of a request to a classifier; an `OutputHandler`."""

    num_prompt_tokens = num_generated_tokens = num_cached_tokens = 0
    ttft: float | None = None

    def __init__(
        self, job: InferenceJob, inputs: tuple[bytes, ...], context: RequestContext
    ) -> None:
        self.job, self.context = job, context
        self.id = f"infer-{uuid.uuid4().hex}"
        self.client, self.choices = self, (self,)
        self.started = time.monotonic()
        self.error: ApiError | None = None
        self.finish_reason: str | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.began = self.done
        self._inputs, self._tensors = inputs, tuple[bytes, ...]()
        self._engine_id = context.engine.new_id()

    def submit(self) -> None:
        """Send the rows to the engine."""
        request = InferenceRequest(
            id=self._engine_id,
            rows=self.job.rows,
            inputs=self._inputs,
            deadline=self.context.deadline,
        )
        self._inputs = ()
        self.context.engine.add_request(request, self)

    def flush(self) -> None:
        """Do nothing: outputs are not streamed."""

    def cancel(self) -> None:
        """Abort the request: the client is gone, or it failed."""
        if self.finish_reason is None:
            self.context.engine.abort(self._engine_id, FinishReason.CANCELLED)

    def fail(self, error: ApiError) -> None:
        """Fail the response."""
        if not self.done.done():
            self.error = error
            self.cancel()
            self.done.set_result(None)

    def on_error(self, status: int, message: str, hint: str) -> None:
        """Fail the response."""
        retry_after = DEFAULT_RETRY_AFTER_S if status in (429, 503) else None
        self.fail(ApiError(status, message, hint, retry_after))

    def on_output(self, output: Output, now: float) -> None:
        """Take the outputs: there is one for a request."""
        if output.tensors is not None:
            self._tensors, self.finish_reason = output.tensors, "stop"
            if not self.done.done():
                self.done.set_result(None)
        elif output.finish_reason is not None:
            self.on_error(*FINISH_ERRORS[output.finish_reason])

    def response(self) -> Response:
        """Return the complete response."""
        return self.job.response(self._tensors)
