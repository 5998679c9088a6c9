"""Embeddings of sequences: the hidden states of their tokens, pooled and L2-normalized.

    mean   of the hidden states of all tokens (sentence-transformers' default for encoders)
    last   of the last token, the only one that has seen the whole text in a decoder
    cls    of the first token, which BERT's tokenizer adds to every text

An embedding has the same bits whatever else is in the batch. A mean is the attention of a query to
keys that are all zero: the weights are equal, and `ops.attention` accumulates the values of a
sequence in float32 in an order that depends on its length alone. (The order of `Tensor.sum` depends
on the number of threads.)

Legend: T tokens, D channels, B sequences.
"""

# pyright: basic
from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from ingot import ops
from ingot.nn.decoder import Decoder
from ingot.nn.encoder import Encoder
from ingot.nn.layout import BatchLayout

_MAX_HEAD = 128  # channels


class Pooling(Enum):
    """How the hidden states of a sequence become one vector."""

    MEAN = "mean"
    LAST = "last"
    CLS = "cls"


def embed(
    model: Encoder | Decoder, tokens_T: Tensor, layout: BatchLayout, pooling: Pooling
) -> Tensor:
    """Return the embedding of each sequence, (B, D), in float32 and of length 1.

    >>> from ingot.nn import preset
    >>> model = Decoder.from_config(preset("tiny"), seed=0)
    >>> layout = BatchLayout.packed([3, 2])
    >>> embedding = embed(model, torch.tensor([1, 2, 3, 4, 5]), layout, Pooling.LAST)
    >>> embedding.shape, embedding.norm(dim=-1).round(decimals=3)
    (torch.Size([2, 64]), tensor([1., 1.], grad_fn=<RoundBackward1>))
    """
    return normalize(pool(model(tokens_T, layout), layout, pooling))


def pool(hidden_TD: Tensor, layout: BatchLayout, pooling: Pooling) -> Tensor:
    """Return the pooled hidden states of each sequence, (B, D), in float32.

    >>> hidden = torch.tensor([[1.0], [2.0], [6.0], [5.0]])
    >>> pool(hidden, BatchLayout.packed([3, 1]), Pooling.MEAN)
    tensor([[3.],
            [5.]])
    """
    starts = layout.cu_seqlens
    if pooling is Pooling.CLS:
        return ops.embedding(starts[:-1], hidden_TD).float()
    if pooling is Pooling.LAST:
        return ops.embedding(starts[1:] - 1, hidden_TD).float()
    return _mean(hidden_TD.float(), starts)


def normalize(x_BD: Tensor) -> Tensor:
    """Scale each row to length 1; a row of zeros remains.

    >>> normalize(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    return x_BD / ops.square_sum(x_BD).sqrt().clamp_min(1e-12)[:, None]


def _mean(x_TD: Tensor, cu_seqlens: Tensor) -> Tensor:
    width = max(n for n in range(1, _MAX_HEAD + 1) if x_TD.shape[1] % n == 0)
    values = x_TD.unflatten(1, (-1, width))
    sequences = torch.arange(len(cu_seqlens), dtype=torch.int32, device=x_TD.device)
    query = values.new_zeros(len(cu_seqlens) - 1, *values.shape[1:])
    keys, lengths = torch.zeros_like(values), cu_seqlens.diff().int()
    return ops.attention(query, keys, values, sequences, lengths, None, False).flatten(1)
