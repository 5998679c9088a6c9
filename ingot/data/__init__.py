"""Datasets and loaders: from text and images to the batches of a training step.

    from pathlib import Path
    from ingot import data
    from ingot.nn import BatchLayout

    # Once: tokenize text to disk. `ingot tokenize stdlib tokens --vocab-size 4096` does the same.
    dataset = data.tokenize(data.Source("stdlib"), Path("tokens"), vocab_size=4096)

    # Or open an existing directory. `dataset.hash` identifies its content.
    dataset = data.TokenDataset(Path("tokens"))

    # Samples of 512 tokens without padding; `lengths` separates the documents in a sample.
    train = data.PackedDataset(dataset.train, seq_len=512)
    validation = data.PackedDataset(dataset.validation, seq_len=512)

    # Endless, with a new order in every epoch; batch_size=8 samples for this rank in each step.
    loader = data.Loader(train, batch_size=8, seed=0, rank=0, world_size=1)
    for batch in loader:
        layout = BatchLayout.packed(batch.lengths)
        hidden_TD = model(batch.tokens, layout)  # tokens_T: int64, T = 8 * 512
        losses_T = ops.linear_cross_entropy(hidden_TD, model.lm_head_weight, batch.targets)
        batch.sample_ids  # train.batch(batch.sample_ids) returns the same batch again
        loader.wait_seconds  # total seconds that the loop has waited for data
        state = loader.state_dict()  # {"sample": 8, "seed": 0}, after the batches handed out

    loader.load_state_dict(state)  # also with another batch size, rank and world size

    # Validation: in order, without a loader.
    for start in range(0, len(validation), 8):
        batch = validation.batch(range(start, min(start + 8, len(validation))))

    # Conversations: whole ones in samples of at most 1024 tokens. `encode` returns the tokens of a
    # row and which of them are trained (`ingot.workflows.chat_data.row_encoder`).
    rows, held_out = data.split_rows("chats.jsonl", None, validation_fraction=0.05)
    train = data.ChatDataset(data.encode_rows(rows, encode, max_length=1024), seq_len=1024)

    # Images, or any arrays: batch.x, batch.y, batch.sample_ids
    train, validation = data.digits().split(0.2)  # or data.xor(), data.mnist(folder)
    loader = data.Loader(train, batch_size=64, seed=0)

A document's last token has no target: it is -100, which losses ignore. In each epoch the sample
with the last tokens is shorter than the others, wherever it occurs.

`sample` counts the samples that all ranks together have taken. A step of w ranks with b samples
each takes b * w of them, rank r the b that begin at sample + r * b: so a run can be resumed with
any number of ranks, and with any division of the same global batch.

`Loader` takes any object that has `len()` and `batch(indices)` (the protocol `Dataset`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingot.data.array import ArrayBatch, ArrayDataset, xor
    from ingot.data.chat_dataset import ChatDataset, EncodeRow, encode_rows
    from ingot.data.image import digits, mnist
    from ingot.data.loader import Dataset, Loader
    from ingot.data.pack import MAX_LENGTH, PackedDataset, TokenBatch
    from ingot.data.preference import PairBatch, PairDataset, PairRow, encode_pairs, read_pairs
    from ingot.data.row import ChatRow, Row, TextRow, read_rows, split_rows
    from ingot.data.source import Source
    from ingot.data.token_dataset import TokenDataset, tokenize

# Loaded on first use: tokenizing does not need torch, nor does `--help` need numpy.
_HOMES = {
    "ArrayBatch": "array",
    "ArrayDataset": "array",
    "TokenDataset": "token_dataset",
    "Loader": "loader",
    "PackedDataset": "pack",
    "ChatDataset": "chat_dataset",
    "ChatRow": "row",
    "EncodeRow": "chat_dataset",
    "MAX_LENGTH": "pack",
    "PairBatch": "preference",
    "PairDataset": "preference",
    "PairRow": "preference",
    "Row": "row",
    "TextRow": "row",
    "Dataset": "loader",
    "Source": "source",
    "TokenBatch": "pack",
    "digits": "image",
    "encode_pairs": "preference",
    "encode_rows": "chat_dataset",
    "read_pairs": "preference",
    "read_rows": "row",
    "split_rows": "row",
    "mnist": "image",
    "tokenize": "token_dataset",
    "xor": "array",
}

__all__ = [
    "MAX_LENGTH",
    "ArrayBatch",
    "ArrayDataset",
    "ChatDataset",
    "ChatRow",
    "Dataset",
    "EncodeRow",
    "Loader",
    "PackedDataset",
    "PairBatch",
    "PairDataset",
    "PairRow",
    "Row",
    "Source",
    "TextRow",
    "TokenBatch",
    "TokenDataset",
    "digits",
    "encode_pairs",
    "encode_rows",
    "mnist",
    "read_pairs",
    "read_rows",
    "split_rows",
    "tokenize",
    "xor",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"ingot.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ingot.data' has no attribute '{name}'")
