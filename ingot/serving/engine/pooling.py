"""Pooling engine: embeddings of many requests, batched as they arrive.

    engine = PoolingEngine(encoder, EmbeddingConfig(pooling=Pooling.MEAN, max_seq_len=256))
    engine.add_request(Request(id=1, prompt=(101, 7592, 102), max_tokens=1))
    while engine.has_unfinished_requests:
        for output in engine.step():
            output.embedding

A step computes the requests that wait, in the order of their arrival, up to a budget of tokens;
those that arrive meanwhile are the next batch. Tokens are packed, so nothing is padded. A request
is computed in one step and needs no KV cache; the rest of its batch does not change its embedding.
The interface is that of `Engine`.
"""

# pyright: basic
from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

import torch

from ingot.core import log
from ingot.core.errors import IngotError
from ingot.interop.sentence_transformers import EmbeddingConfig
from ingot.nn import BatchLayout, Decoder, Encoder
from ingot.nn.pooling import embed
from ingot.serving.engine.adapters import LoadedAdapter
from ingot.serving.engine.output import EngineStats, Output
from ingot.serving.engine.request import FinishReason, Request

MAX_NUM_BATCHED_TOKENS = 2048
_LOG = log.logger(__name__)


class PoolingEngine:
    """Computes embeddings with an encoder or a decoder.

    A request has `max_tokens` 1; its sampling parameters are ignored.

    >>> from ingot.nn import preset
    >>> from ingot.nn.pooling import Pooling
    >>> decoder = Decoder.from_config(preset("tiny"), seed=0)
    >>> engine = PoolingEngine(decoder, EmbeddingConfig(pooling=Pooling.LAST, max_seq_len=512))
    >>> engine.add_request(Request(id=1, prompt=(5, 6, 7), max_tokens=1))
    >>> engine.add_request(Request(id=2, prompt=(8, 9), max_tokens=1))
    >>> [(output.id, len(output.embedding)) for output in engine.step()]
    [(1, 256), (2, 256)]
    >>> engine.has_unfinished_requests
    False
    """

    def __init__(
        self,
        model: Encoder | Decoder,
        config: EmbeddingConfig,
        *,
        max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.config = model, config
        self.max_num_batched_tokens = max_num_batched_tokens
        self._clock = clock
        self._waiting: dict[int, Request] = {}
        self._outputs: list[Output] = []  # returned by the next step
        self._steps = self._failed_steps = self._prompt_tokens = 0

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._waiting or self._outputs)

    def add_request(self, request: Request) -> None:
        """Queue a request; raise an error if it can never be served."""
        count, vocab_size = len(request.prompt), self.model.config.vocab_size
        if request.id in self._waiting:
            hint = "use an id that no unfinished request has"
            raise IngotError(f"duplicate request id {request.id}", hint=hint)
        if count > self.config.max_seq_len:
            raise IngotError(
                f"request {request.id}: a text may have {self.config.max_seq_len} tokens, got "
                f"{count}",
                hint="shorten the text, or split it",
            )
        if max(request.prompt) >= vocab_size:
            raise IngotError(
                f"request {request.id}: token ids must be below the vocabulary size {vocab_size}, "
                f"got {max(request.prompt)}",
                hint="encode the text with the tokenizer of this model",
            )
        if request.adapter:
            _reject_adapters()
        self._waiting[request.id] = request

    def abort(self, id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Finish a request early; an unknown id is ignored."""
        if self._waiting.pop(id, None) is not None:
            self._outputs.append(Output(id, finish_reason=reason))

    def step(self) -> list[Output]:
        """Compute one batch; return the outputs of the requests that finished."""
        for request in list(self._waiting.values()):
            if request.deadline is not None and request.deadline <= self._clock():
                self.abort(request.id, FinishReason.DEADLINE)
        outputs, self._outputs = self._outputs, []
        batch = self._next_batch()
        if not batch:
            return outputs
        self._steps += 1
        self._prompt_tokens += sum(len(request.prompt) for request in batch)
        try:
            embeddings = self._compute(batch)
        except Exception as error:  # out of memory is a RuntimeError in torch
            self._failed_steps += 1
            _LOG.exception("step %d failed, and with it %d requests", self._steps, len(batch))
            message, reason = f"{type(error).__name__}: {error}"[:1000], FinishReason.FAILED
            return outputs + [Output(r.id, finish_reason=reason, error=message) for r in batch]
        return outputs + [
            Output(request.id, finish_reason=FinishReason.STOP, embedding=embedding)
            for request, embedding in zip(batch, embeddings, strict=True)
        ]

    def stats(self) -> EngineStats:
        """Return the current state and the counters since the start."""
        return EngineStats(
            num_running=0,
            num_waiting=len(self._waiting),
            num_used_blocks=0,
            num_blocks=0,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0,
            generated_tokens=0,
            preemptions=0,
            draft_tokens=0,
            accepted_tokens=0,
            failed_steps=self._failed_steps,
        )

    @property
    def loaded_adapters(self) -> list[LoadedAdapter]:
        """None: embedding models are served without LoRA adapters."""
        return []

    def load_adapter(self, name: str, source: str, *, replace: bool = False) -> NoReturn:
        """Raise an error: embedding models are served without LoRA adapters."""
        _reject_adapters()

    def unload_adapter(self, name: str) -> NoReturn:
        """Raise an error: embedding models are served without LoRA adapters."""
        _reject_adapters()

    def _next_batch(self) -> list[Request]:
        """Remove requests from the queue, at least one, up to the budget of tokens."""
        batch: list[Request] = []
        left = self.max_num_batched_tokens
        for request in self._waiting.values():
            left -= len(request.prompt)
            if batch and left < 0:
                break
            batch.append(request)
        for request in batch:
            del self._waiting[request.id]
        return batch

    @torch.inference_mode()
    def _compute(self, batch: list[Request]) -> list[bytes]:
        device = self.model.device
        layout = BatchLayout.packed([len(request.prompt) for request in batch], device)
        tokens_T = torch.tensor([token for request in batch for token in request.prompt])
        embeddings_BD = embed(self.model, tokens_T.to(device), layout, self.config.pooling)
        return [row.tobytes() for row in embeddings_BD.cpu().numpy().astype("<f4", copy=False)]


def _reject_adapters() -> NoReturn:
    raise IngotError(
        "embedding models are served without LoRA adapters", hint="merge the adapter: ingot merge"
    )
