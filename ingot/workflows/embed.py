"""Compute embeddings of texts with a model in one object.

    embedder = ingot.Embedder("minilm")
    embedder.embed("A sentence")                            # (D,)
    embeddings = embedder.embed(["A sentence", "Another"])  # (2, D)
    similarity = embeddings @ embeddings.T

`Embedder` is a layer over the server's `PoolingEngine`: texts are packed into batches without
padding, and the embedding of a text has the same bits alone, in any batch, and from the server.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ingot.core import device as devices
from ingot.core.errors import IngotError, UnknownName
from ingot.interop import hub, sentence_transformers
from ingot.interop.tokenizer import Tokenizer
from ingot.nn.pooling import Pooling
from ingot.serving.engine.pooling import PoolingEngine
from ingot.serving.engine.request import Request
from ingot.workflows.llm import Prompt, as_batch, load_kernels


class Embedder:
    """A model that computes embeddings. Calls are made from one thread.

    Args:
        model: A model directory, or `ORG/NAME` on the Hugging Face hub: an encoder or a decoder.
        device: "auto", "cpu", "cuda", "cuda:1", ...: see `ingot.core.device.resolve`.
        dtype: Of the weights; by default that of their files.
        pooling: "mean", "last" or "cls"; by default that of the directory, or else "mean" for
            encoders and "last" for decoders.
        on_status: Called with a line of text before each part of loading that may take long.
    """

    def __init__(
        self,
        model: Path | str,
        *,
        device: str | torch.device = "auto",
        dtype: torch.dtype | None = None,
        pooling: Literal["mean", "last", "cls"] | None = None,
        on_status: Callable[[str], object] = lambda status: None,
    ) -> None:
        names = [kind.value for kind in Pooling]
        if pooling is not None and pooling not in names:
            raise UnknownName("pooling", pooling, names)
        place, directory = devices.resolve(device), hub.model_path(model)
        with ThreadPoolExecutor(1) as pool:
            kernels = pool.submit(load_kernels, place)  # while the weights are read
            self.model, self.config = sentence_transformers.load(directory, dtype, place)
            self.tokenizer = Tokenizer.load(directory)
            on_status("compiling the CPU kernels, once per machine")
            kernels.result()
        if pooling is not None:
            self.config = replace(self.config, pooling=Pooling(pooling))

    @property
    def dim(self) -> int:
        """Number of elements of an embedding."""
        return self.model.config.dim

    @property
    def max_seq_len(self) -> int:
        """Maximum number of tokens of a text."""
        return self.config.max_seq_len

    def embed(self, texts: Prompt | Sequence[Prompt]) -> Tensor:
        """Return the embedding of a text, (D,), or of several, (N, D): float32 of length 1.

        A text is a string or a list of token ids. One with more tokens than `max_seq_len` is an
        error: no part of a text is dropped silently.
        """
        several, batch = as_batch(texts)
        engine = PoolingEngine(self.model, self.config)
        for id, text in enumerate(batch):
            engine.add_request(Request(id=id, prompt=self._encode(text), max_tokens=1))
        embeddings = torch.empty(len(batch), self.dim)
        while engine.has_unfinished_requests:
            for output in engine.step():
                if output.embedding is None:
                    raise IngotError(
                        f"text {output.id}: {output.error}", hint="give fewer or shorter texts"
                    )
                row = torch.frombuffer(bytearray(output.embedding), dtype=torch.float32)
                embeddings[output.id] = row
        return embeddings if several else embeddings[0]

    def _encode(self, text: Prompt) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text) if isinstance(text, str) else text)
