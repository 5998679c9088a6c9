"""Perplexity of a model with an int8 KV cache and with one in the dtype of the model.

    python benchmarks/kv_cache.py MODEL

scores sequences of 768 tokens of Python's standard library, and prints both perplexities and their
ratio with its standard error over the sequences.
"""

# pyright: basic
from __future__ import annotations

import math
import sys
from itertools import islice
from statistics import mean, stdev

import ingot
from ingot.data import Source
from ingot.nn.layout import KVCacheDtype

_LENGTH, _SEQUENCES = 768, 32


def main(model: str) -> None:
    """Score the sequences with both caches."""
    losses = {dtype: _losses(model, dtype) for dtype in ("auto", "int8")}
    for dtype, values in losses.items():
        print(f"{dtype:<5} perplexity {math.exp(mean(values)):.4f}")  # noqa: T201
    differences = [b - a for a, b in zip(losses["auto"], losses["int8"], strict=True)]
    error = stdev(differences) / len(differences) ** 0.5
    print(f"ratio {math.exp(mean(differences)):.5f}, standard error {error:.5f}")  # noqa: T201


def _losses(model: str, dtype: KVCacheDtype) -> list[float]:
    """Return the mean loss of a token, of each sequence."""
    llm = ingot.LLM(model, kv_cache_dtype=dtype)
    encoded = (llm.tokenizer.encode(text) for text in Source("stdlib").documents())
    sequences = [
        ids[:_LENGTH] for ids in islice((i for i in encoded if len(i) >= _LENGTH), _SEQUENCES)
    ]
    return [-mean(score.logprobs) for score in llm.score(sequences)]


if __name__ == "__main__":
    main(sys.argv[1])
