"""Derive a model from another one: write its directory, and measure how far it is from the source.

    with derived_directory("out", source, num_bytes) as out:
        before_TD = hidden_states(decoder, sequences)
        ...                                              # change the weights of the decoder
        drift = measure_drift(decoder, before_TD, decoder, hidden_states(decoder, sequences))
        hf.save(decoder, out)

The distance is the Kullback-Leibler divergence of the next-token distributions over real text.

Legend: T tokens, D channels, V vocabulary.
"""

# pyright: basic
from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ingot.core import paths
from ingot.core.errors import ConfigError
from ingot.data import Source
from ingot.interop import directory as directories
from ingot.interop.tokenizer import Tokenizer
from ingot.nn import BatchLayout, Decoder
from ingot.nn.weights import INDEX
from ingot.observe.drift import DistributionDrift, DistributionMeter

POSITIONS = 512
"""Number of tokens that models are compared on."""
_CHUNK = 32  # rows of logits in memory at a time


@contextmanager
def derived_directory(directory: Path, source: Path, num_bytes: int) -> Generator[Path]:
    """Create a directory with the files of `source` but its weights and config.

    It appears when the block ends, or not at all. An existing directory, or too little space for
    `num_bytes` of weights, is an error at once.
    """
    with paths.atomic_directory(directory, num_bytes) as temporary:
        for name in set(directories.OPTIONAL_FILES) - {INDEX}:
            if (source / name).is_file():
                shutil.copyfile(source / name, temporary / name)
        yield temporary


def tokenize_text(
    text: str,
    tokenizer: Tokenizer,
    decoder: Decoder,
    *,
    positions: int = POSITIONS,
    length: int = 128,
    skip: int = 0,
) -> list[list[int]]:
    """Return the first tokens of documents as sequences.

    Args:
        text: A file, a folder or "stdlib".
        tokenizer: The model's tokenizer.
        decoder: The model, which bounds the length.
        positions: Number of tokens together; fewer if there is less text.
        length: Max tokens of a document.
        skip: Number of documents with text to leave out at the beginning.
    """
    length = min(length, decoder.config.max_seq_len)
    documents = (
        tokenizer.encode(text[: 16 * length])[:length] for text in Source(text).documents()
    )
    sequences: list[list[int]] = []
    for ids in itertools.islice(filter(None, documents), skip, None):
        left = positions - sum(map(len, sequences))
        sequences.append(ids[:left])
        if left <= len(ids):
            break
    if not sequences:
        raise ConfigError(
            f"{text} has no more than {skip} documents" if skip else f"{text} has no text",
            hint="name a folder with more text: --text FOLDER",
        )
    return sequences


@torch.inference_mode()
def hidden_states(decoder: Decoder, sequences: list[list[int]], adapted: bool = False) -> Tensor:
    """Return the hidden state of each token, (T, D); with `adapted`, by the adapter in slot 0."""
    layout = BatchLayout.packed([len(ids) for ids in sequences], decoder.device)
    tokens_T = torch.tensor([id for ids in sequences for id in ids], device=decoder.device)
    if adapted:
        layout = replace(layout, adapters=torch.zeros_like(tokens_T, dtype=torch.int32))
    return decoder(tokens_T, layout)


@torch.inference_mode()
def measure_drift(
    before: Decoder, before_TD: Tensor, after: Decoder, after_TD: Tensor
) -> DistributionDrift:
    """Compare the distributions of two hidden states, by the LM heads of two decoders."""
    meter = DistributionMeter()
    for before_rows, after_rows in zip(
        before_TD.split(_CHUNK), after_TD.split(_CHUNK), strict=True
    ):
        before_TV, after_TV = before.logits(before_rows), after.logits(after_rows)
        meter.add(before_TV, after_TV, before_TV.argmax(-1))
    return meter.result()


@torch.inference_mode()
def perplexity(decoder: Decoder, hidden_TD: Tensor, sequences: list[list[int]]) -> float | None:
    """Return the perplexity of sequences with these hidden states; None if all have one token.

    The first token of a sequence has no prediction.
    """
    tokens_T = torch.tensor([id for ids in sequences for id in ids], device=decoder.device)
    ends_T = torch.tensor([len(ids) for ids in sequences], device=decoder.device).cumsum(0)
    has_next_T = torch.ones_like(tokens_T, dtype=torch.bool)
    has_next_T[ends_T - 1] = False
    if not has_next_T.any():
        return None
    logprobs = decoder.logprobs(hidden_TD[has_next_T], tokens_T.roll(-1)[has_next_T])
    return math.exp(-float(logprobs.double().mean()))
