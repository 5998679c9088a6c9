"""Sentences per second of an embedding model: ingot against transformers.

    python benchmarks/embeddings.py MODEL [--rounds N] [--batch N] [--sentences N] [--shuffle]

embeds sentences of Python's language reference, in batches, by

    transformers     AutoModel in float32, padded batches, mean pooling
    ingot            in float32
    ingot-bf16       in bfloat16

Sentences are sorted by length first, as sentence-transformers does: with neighbors of about the
same length transformers pads least. With `--shuffle` they are in random order, as requests arrive
at a server. Times include tokenization. The systems are interleaved; each
row has the median of the rounds and its ratio to transformers. The last column is the smallest
cosine between an embedding and transformers'.
"""

# pyright: basic
from __future__ import annotations

import argparse
import random
import re
import time
from collections.abc import Callable
from pydoc_data import topics
from statistics import median

import torch
from torch import Tensor

import ingot
from ingot.interop import hub


def main(model: str, rounds: int, batch: int, count: int, shuffle: bool) -> None:
    """Time the systems and print a row for each."""
    texts = _sentences(count)
    if shuffle:
        random.Random(0).shuffle(texts)
    batches = [texts[at : at + batch] for at in range(0, len(texts), batch)]
    systems: dict[str, Callable[[list[str]], Tensor]] = {
        "transformers": _by_transformers(model),
        "ingot": ingot.Embedder(model, dtype=torch.float32).embed,
        "ingot-bf16": ingot.Embedder(model, dtype=torch.bfloat16).embed,
    }
    results = {name: torch.cat([embed(b) for b in batches]) for name, embed in systems.items()}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(rounds):
        for name, embed in systems.items():
            begin = time.perf_counter()
            for one in batches:
                embed(one)
            seconds[name].append(time.perf_counter() - begin)
    for name in systems:
        ratio = median(seconds["transformers"]) / median(seconds[name])
        cosine = float((results[name] * results["transformers"]).sum(-1).min())
        rate = len(texts) / median(seconds[name])
        print(f"{name:14}{rate:9,.0f} sentences/s{ratio:7.2f}x  cosine {cosine:.6f}")  # noqa: T201


def _by_transformers(model: str) -> Callable[[list[str]], Tensor]:
    from transformers import AutoModel, AutoTokenizer

    directory = hub.model_path(model)
    encoder = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)

    @torch.inference_mode()
    def embed(texts: list[str]) -> Tensor:
        inputs = tokenizer(texts, padding=True, return_tensors="pt")
        hidden, mask = encoder(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1))

    return embed


def _sentences(count: int) -> list[str]:
    """Return sentences of 3 to 60 words, the shortest first."""
    text = " ".join(" ".join(topics.topics.values()).split())
    sentences = [
        s for s in re.split(r"(?<=[a-z][.:]) (?=[A-Z])", text) if 3 <= len(s.split()) <= 60
    ]
    step = max(1, len(sentences) // count)
    return sorted(sentences[::step][:count], key=len)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sentences", type=int, default=512)
    parser.add_argument("--shuffle", action="store_true")
    args = parser.parse_args()
    main(args.model, args.rounds, args.batch, args.sentences, args.shuffle)
