"""Pooling engine: embeddings of many requests, batched as they arrive.

    engine = PoolingEngine(encoder, EmbeddingConfig(pooling=Pooling.MEAN, max_seq_len=256))
    engine.add_request(Request(id=1, prompt=(101, 7592, 102), max_tokens=1))
    while engine.has_unfinished_requests:
        for output in engine.step():
            output.embedding

A step computes the requests that wait, in the order of their arrival, up to a budget of tokens;
those that arrive meanwhile are the next batch. Tokens are packed, so nothing is padded. A request
is computed in one step and needs no KV cache; the rest of its batch does not change its embedding.
"""

# pyright: basic
from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ingot.core.errors import IngotError
from ingot.interop.sentence_transformers import EmbeddingConfig
from ingot.nn import BatchLayout, Decoder, Encoder
from ingot.nn.pooling import embed
from ingot.serving.engine.output import Output
from ingot.serving.engine.request import FinishReason, Request
from ingot.serving.engine.stateless import StatelessEngine, reject_adapters

MAX_NUM_BATCHED_TOKENS = 2048


class PoolingEngine(StatelessEngine[Request]):
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
        super().__init__(clock)
        self.model, self.config = model, config
        self.max_num_batched_tokens = max_num_batched_tokens

    def _check(self, request: Request) -> None:
        count, vocab_size = len(request.prompt), self.model.config.vocab_size
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
            reject_adapters()

    def _next_batch(self) -> list[int]:
        """Return waiting requests, at least one, up to the budget of tokens."""
        batch: list[int] = []
        left = self.max_num_batched_tokens
        for request in self._waiting.values():
            left -= len(request.prompt)
            if batch and left < 0:
                break
            batch.append(request.id)
        return batch

    @torch.inference_mode()
    def _compute(self, batch: list[Request]) -> list[Output]:
        lengths, device = [len(request.prompt) for request in batch], self.model.device
        self._prompt_tokens += sum(lengths)
        layout = BatchLayout.packed(lengths, device)
        tokens_T = torch.tensor([token for request in batch for token in request.prompt])
        embeddings_BD = embed(self.model, tokens_T.to(device), layout, self.config.pooling)
        rows = embeddings_BD.cpu().numpy().astype("<f4", copy=False)
        return [
            Output(request.id, finish_reason=FinishReason.STOP, embedding=row.tobytes())
            for request, row in zip(batch, rows, strict=True)
        ]
