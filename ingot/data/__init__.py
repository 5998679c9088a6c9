"""From text and images to the batches of a training step; resumable to the bit.

    from pathlib import Path
    from ingot import data
    from ingot.nn import BatchLayout

    # Once: tokenize text to disk. `ingot tokenize stdlib tokens --vocab-size 4096` does the same.
    corpus = data.tokenize(data.Source("stdlib"), Path("tokens"), vocab_size=4096)

    # Or what was made before. `corpus.hash` says what is in it, `corpus.size` is the vocabulary's.
    corpus = data.TokenDataset(Path("tokens"))

    # Fixed budgets of 512 tokens without padding; documents are told apart by their lengths.
    train = data.PackedDataset(corpus.train, seq_len=512)
    held_out = data.PackedDataset(corpus.validation, seq_len=512)

    # Endless, shuffled anew in every epoch. batch_size=8 samples for this rank in each step.
    loader = data.Loader(train, batch_size=8, seed=0, rank=0, world_size=1)
    for batch in loader:
        layout = BatchLayout.packed(batch.lengths)  # one length a piece of a document
        hidden_TD = model(batch.tokens, layout)  # tokens_T: int64, T = 8 * 512
        losses_T = ops.linear_cross_entropy(hidden_TD, model.lm_head_weight, batch.targets)
        batch.sample_ids  # train.batch(batch.sample_ids) returns the same batch again
        loader.wait_seconds  # seconds that the loop has waited for data, in all
        state = loader.state_dict()  # {"sample": 8, "seed": 0}, after the batches handed out

    loader.seek(state["sample"])  # goes on there, also with another batch, rank and world

    # Validation: in order and no loader.
    for start in range(0, len(held_out), 8):
        batch = held_out.batch(range(start, min(start + 8, len(held_out))))

    # Images, or any arrays: batch.x, batch.y, batch.sample_ids
    train, held_out = data.digits().split(0.2)  # or data.xor(), data.mnist(folder)
    loader = data.Loader(train, batch_size=64, seed=0)

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
    from ingot.data.array import ArrayBatch, ArrayDataset, xor
    from ingot.data.image import digits, mnist
    from ingot.data.loader import Dataset, Loader
    from ingot.data.pack import PackedDataset, TokenBatch
    from ingot.data.source import Source
    from ingot.data.token_dataset import TokenDataset, tokenize

# They load when they are first named: torch is not needed to tokenize, nor numpy to read help.
_HOMES = {
    "ArrayBatch": "array",
    "ArrayDataset": "array",
    "TokenDataset": "token_dataset",
    "Loader": "loader",
    "PackedDataset": "pack",
    "Dataset": "loader",
    "Source": "source",
    "TokenBatch": "pack",
    "digits": "image",
    "mnist": "image",
    "tokenize": "token_dataset",
    "xor": "array",
}

__all__ = [
    "ArrayBatch",
    "ArrayDataset",
    "Dataset",
    "Loader",
    "PackedDataset",
    "Source",
    "TokenBatch",
    "TokenDataset",
    "digits",
    "mnist",
    "tokenize",
    "xor",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ingot.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ingot.data' has no attribute '{name}'")
