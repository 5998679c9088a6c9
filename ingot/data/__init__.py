"""From text and images to the batches of a training step; resumable to the bit.

    from pathlib import Path
    from ingot import data
    from ingot.nn import BatchLayout

    # Once: tokenize text to disk. `ingot tokenize stdlib tokens --vocab-size 4096` does the same.
    corpus = data.prepare(data.Source("stdlib"), Path("tokens"), vocab=4096)

    # Or what was made before. `corpus.hash` says what is in it, `corpus.size` is the vocabulary's.
    corpus = data.Corpus(Path("tokens"))

    # Fixed budgets of 512 tokens without padding; documents are told apart by their lengths.
    train = data.Packed(corpus.train, length=512)
    held_out = data.Packed(corpus.validation, length=512)

    # Endless, shuffled anew in every epoch. batch=8 samples for this rank in each step.
    loader = data.Loader(train, batch=8, seed=0, rank=0, world=1)
    for batch in loader:
        layout = BatchLayout.packed(batch.lengths)  # one length a piece of a document
        hidden_TD = model(batch.tokens, layout)  # tokens_T: int64, T = 8 * 512
        losses_T = ops.linear_cross_entropy(hidden_TD, model.lm_head_weight, batch.targets)
        batch.ids  # which samples these are: train.batch(batch.ids) makes the same batch again
        loader.waited  # seconds that the loop has waited for data, in all
        state = loader.state()  # {"sample": 8, "seed": 0}: behind the batches that were handed out

    loader.seek(state["sample"])  # goes on there, also with another batch, rank and world

    # Validation: in order and no loader.
    for start in range(0, len(held_out), 8):
        batch = held_out.batch(range(start, min(start + 8, len(held_out))))

    # Images, or any arrays: batch.x, batch.y, batch.ids
    train, held_out = data.digits().split(0.2)  # or data.xor(), data.mnist(folder)
    loader = data.Loader(train, batch=64, seed=0)

The target of a document's last token, for which there is none, is -100, which losses ignore. Of an
epoch's samples the one with the last tokens is shorter than the others, wherever it comes.

`sample` counts the samples that all ranks together have taken. A step of w ranks with b samples
each takes b * w of them, rank r those at sample + r, sample + r + w, ...: so a run can go on with
any number of ranks, and with any split of the same global batch.

What a set of samples has to have for `Loader` is `len()` and `batch(indices)`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.data.array import ArrayBatch, Arrays, xor
    from ingot.data.corpus import Corpus, prepare
    from ingot.data.image import digits, mnist
    from ingot.data.loader import Loader, Samples
    from ingot.data.pack import Packed, TokenBatch
    from ingot.data.source import Source

# They load when they are first named: torch is not needed to tokenize, nor numpy to read help.
_HOMES = {
    "ArrayBatch": "array",
    "Arrays": "array",
    "Corpus": "corpus",
    "Loader": "loader",
    "Packed": "pack",
    "Samples": "loader",
    "Source": "source",
    "TokenBatch": "pack",
    "digits": "image",
    "mnist": "image",
    "prepare": "corpus",
    "xor": "array",
}

__all__ = [
    "ArrayBatch",
    "Arrays",
    "Corpus",
    "Loader",
    "Packed",
    "Samples",
    "Source",
    "TokenBatch",
    "digits",
    "mnist",
    "prepare",
    "xor",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ingot.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ingot.data' has no attribute '{name}'")
