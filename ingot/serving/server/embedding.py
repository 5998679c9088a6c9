"""Embeddings of one HTTP response: submits texts to the engine, formats them as OpenAI's API.

The texts of a request are sent to the engine at once: it computes them, with those of other
requests, in as few batches as its budget of tokens allows.
"""

from __future__ import annotations

import asyncio
import struct
import time
import uuid
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from starlette.responses import Response

from ingot.interop.tokenizer import Tokenizer
from ingot.serving.engine.output import Output
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.server.completion import DEFAULT_RETRY_AFTER_S, FINISH_ERRORS, RequestContext
from ingot.serving.server.errors import ApiError, RequestError, json_response
from ingot.serving.server.openai import Unprocessable
from ingot.serving.workers.wire import EngineReady

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, kw_only=True)
class EmbeddingJob:
    """What to embed for one HTTP request."""

    model: str
    """Name in the response."""
    inputs: list[tuple[int, ...]]
    base64: bool
    """Whether embeddings are base64 of little-endian float32 instead of lists of numbers."""


def encode_inputs(inputs: Sequence[str | list[int]], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Return the token ids of texts; those of token ids are the same."""
    return [tuple(tokenizer.encode(i) if isinstance(i, str) else i) for i in inputs]


def check_inputs(inputs: Sequence[Sequence[int]], info: EngineReady) -> None:
    """Raise the error of the first text that the model cannot embed."""
    for index, ids in enumerate(inputs):
        if not ids:
            raise Unprocessable(f"input.{index}: must not be empty", hint="give some text")
        if len(ids) > info.max_model_len:
            raise RequestError(
                ApiError(
                    400,
                    f"input.{index} has {len(ids):,} tokens; a text may have "
                    f"{info.max_model_len:,}",
                    "shorten the text, or split it",
                    param="input",
                    code="context_length_exceeded",
                )
            )
        if max(ids) >= info.vocab_size:
            raise Unprocessable(
                f"input.{index}: token ids must be below {info.vocab_size:,}",
                hint="send text, or token ids of this model's tokenizer",
            )


class EmbeddingInput:
    """One of the texts of a request; an `OutputHandler`."""

    def __init__(self, batch: EmbeddingBatch, index: int) -> None:
        self.client, self.index = batch, index
        self.id = batch.context.engine.new_id()
        self.embedding: bytes | None = None
        self.finish_reason: str | None = None

    def request(self) -> Request:
        """Return the request to the engine."""
        context = self.client.context
        prompt = self.client.job.inputs[self.index]
        return Request(id=self.id, prompt=prompt, max_tokens=1, deadline=context.deadline)

    def on_error(self, status: int, message: str, hint: str) -> None:
        """Fail the whole response."""
        retry_after = DEFAULT_RETRY_AFTER_S if status in (429, 503) else None
        self.client.fail(ApiError(status, message, hint, retry_after))

    def on_output(self, output: Output, now: float) -> None:
        """Take the embedding: it is the only output."""
        if output.finish_reason is FinishReason.STOP:
            self.embedding, self.finish_reason = output.embedding, "stop"
            self.client.on_finished()
        elif output.finish_reason is not None:
            self.on_error(*FINISH_ERRORS[output.finish_reason])


class EmbeddingBatch:
    """All texts of a request, from the first message to the engine to the body of the response."""

    num_generated_tokens = num_cached_tokens = 0
    ttft: float | None = None

    def __init__(self, job: EmbeddingJob, context: RequestContext) -> None:
        self.job, self.context = job, context
        self.id = f"embd-{uuid.uuid4().hex}"
        self.started = time.monotonic()
        self.error: ApiError | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.began = self.done
        self.choices = [EmbeddingInput(self, index) for index in range(len(job.inputs))]
        self._num_unfinished = len(self.choices)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all texts."""
        return sum(map(len, self.job.inputs))

    def submit(self) -> None:
        """Send all texts to the engine."""
        self.context.engine.add_requests([(one.request(), one) for one in self.choices])

    def flush(self) -> None:
        """Do nothing: embeddings are not streamed."""

    def cancel(self) -> None:
        """Abort unfinished texts: the client is gone, or the request failed."""
        for one in self.choices:
            if one.finish_reason is None:
                self.context.engine.abort(one.id, FinishReason.CANCELLED)

    def fail(self, error: ApiError) -> None:
        """Fail the response."""
        if not self.done.done():
            self.error = error
            self.cancel()
            self.done.set_result(None)

    def on_finished(self) -> None:
        """Finish the response after its last text."""
        self._num_unfinished -= 1
        if not self._num_unfinished and not self.done.done():
            self.done.set_result(None)

    def body(self) -> bytes:
        """Return the complete response body."""
        tokens = self.num_prompt_tokens
        data = [
            {"object": "embedding", "index": one.index, "embedding": self._format(one.embedding)}
            for one in self.choices
        ]
        return _encode(
            {
                "object": "list",
                "data": data,
                "model": self.job.model,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    def response(self) -> Response:
        """Return the complete response."""
        return json_response(200, self.body())

    def _format(self, embedding: bytes | None) -> str | tuple[float, ...]:
        assert embedding is not None
        if self.job.base64:
            return b64encode(embedding).decode()
        return struct.unpack(f"<{len(embedding) // 4}f", embedding)
