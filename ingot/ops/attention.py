"""Attention over packed sequences: one op for training, prefill and decode.

The queries of all sequences are packed, (T, N, H); `cu_seqlens` (B+1) holds the start of each. Keys
and values have one of three layouts:

- training: `k`, `v` are packed like the queries, (T, G, H), and `context_lens` is None;
- contiguous KV cache: `k`, `v` are packed (S, G, H) with `context_lens` (B) keys per sequence;
- paged KV cache: `k`, `v` are (blocks, block size, G, H). Row b of `block_table` (B, M) lists the
  blocks of sequence b in order; their first `context_lens[b]` slots hold its keys. A cache in int8
  is (blocks, block size, G, H + 4): see `ingot.ops.codec`. Its values are rounded to the dtype of
  `q` before anything else is computed, so the result has the bits of a cache of the rounded values.

The last query of a sequence is at the position of its last key. With as many queries as keys, a
call is a whole prompt; with fewer, a chunk of one; with one query, a decode step. Causal queries
attend to keys up to their own position; a `window` of W restricts them to keys less than W away. N
query heads share G key-value heads in groups of N/G (GQA). `scale` defaults to H**-0.5.

`padded_attention` is that of a padded batch, as models outside of ingot have it: (B, L, N, H), and
which positions hold tokens. Its provider packs the tokens.

Legend: T queries, S keys, N query heads, G key-value heads, H channels, B sequences; Q and K the
queries and keys of one sequence.
"""

# pyright: basic
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ingot.core.errors import OpError
from ingot.ops.arguments import fake_like
from ingot.ops.check import check_keys_values
from ingot.ops.codec import KV_SCALE_BYTES, dequantize_kv, quantize_kv
from ingot.ops.inputs import SampleInput, TensorMaker
from ingot.ops.op import op
from ingot.ops.record import Cost, Tolerance
from ingot.ops.softmax import softmax


def sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the queries, keys and values of each sequence: (Q, N, H), (K, G, H), (K, G, H).

    Those of an int8 cache are dequantized.

    >>> q, kv = torch.zeros(3, 2, 4), torch.zeros(3, 1, 4)
    >>> [len(q_b) for q_b, _, _ in sequences(q, kv, kv, torch.tensor([0, 2, 3]))]
    [2, 1]
    """
    starts = cu_seqlens.tolist()
    if not (starts[:1] == [0] and starts[-1] == len(q) and starts == sorted(starts)):
        raise OpError(
            f"attention: cu_seqlens is {starts[:8]} for {len(q)} queries",
            hint="pass the cumulative lengths, from 0 to the number of queries",
        )
    counts = cu_seqlens.diff().tolist() if context_lens is None else context_lens.tolist()
    if len(counts) != len(starts) - 1:
        raise OpError(
            f"attention: {len(starts) - 1} sequences, but {len(counts)} context_lens",
            hint="pass one per sequence",
        )
    if block_table is None and sum(counts) != len(k):
        raise OpError(
            f"attention: {len(k)} keys, but the sequences have {sum(counts)}",
            hint="pass the number of keys of each sequence as context_lens",
        )
    first_key = 0
    for b, num_keys in enumerate(counts):
        q_b = q[starts[b] : starts[b + 1]]
        if num_keys < len(q_b):
            raise OpError(
                f"attention: sequence {b} has {len(q_b)} queries but {num_keys} keys",
                hint="write the keys of the new tokens first; context_lens counts them",
            )
        if block_table is None:
            keys = slice(first_key, first_key + num_keys)
            yield q_b, k[keys], v[keys]
            first_key += num_keys
        else:
            blocks = block_table[b, : -(-num_keys // k.shape[1])]
            if not (
                len(blocks) * k.shape[1] >= num_keys
                and (num_keys == 0 or 0 <= int(blocks.min()) <= int(blocks.max()) < len(k))
            ):
                raise OpError(
                    f"attention: {num_keys} keys of sequence {b} do not fit in blocks "
                    f"{blocks.tolist()}",
                    hint=f"list as many blocks as the keys fill, each from 0 to {len(k) - 1}",
                )
            k_b, v_b = (cache[blocks].flatten(0, 1)[:num_keys] for cache in (k, v))
            if k.dtype == torch.int8:
                k_b, v_b = dequantize_kv(k_b, q.dtype), dequantize_kv(v_b, q.dtype)
            yield q_b, k_b, v_b


def visible(num_queries: int, num_keys: int, causal: bool, window: int | None) -> Tensor:
    """Return the attention mask of a sequence, (Q, K): True where the query attends to the key.

    >>> visible(2, 3, causal=True, window=2).int()
    tensor([[1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    key = torch.arange(num_keys)
    query = torch.arange(num_keys - num_queries, num_keys)[:, None]
    seen = key <= query if causal else torch.ones(num_queries, num_keys, dtype=torch.bool)
    return seen if window is None else seen & ((query - key).abs() < window)


def _samples(make: TensorMaker) -> Iterator[SampleInput]:
    def packed(lengths: list[int]) -> Tensor:
        return make.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], torch.int32)

    def int32(values: list[int] | list[list[int]]) -> Tensor:
        return make.tensor(values, torch.int32)

    def training(
        name: str, lengths: list[int], n: int, g: int, h: int, *rest: object
    ) -> SampleInput:
        total = sum(lengths)
        q, k, v = make(total, n, h), make(total, g, h), make(total, g, h)
        return SampleInput(name, (q, k, v, packed(lengths), None, None, *rest))

    yield training("typical", [9, 4], 4, 2, 16, True, None, None)
    yield training("odd", [7, 1, 5], 3, 1, 11, True, None, None)
    yield training("large", [131, 67], 6, 2, 20, True, None, None)
    yield training("not_causal", [6, 3], 4, 4, 8, False, None, 0.5)
    yield training("window", [12, 2], 2, 1, 8, True, 3, None)
    yield training("window_not_causal", [9], 2, 2, 8, False, 4, None)
    yield training("empty_sequence", [3, 0, 2], 2, 2, 8, True, None, None)

    q, k, v = make(8, 3, 2, 8).unbind(1)
    yield SampleInput("strided", (q, k, v, packed([5, 3]), None, None, True, None, None))
    q, k, v = make.spread(6, 2, 8), make.spread(6, 2, 8), make.spread(6, 2, 8)
    yield SampleInput("extreme", (q, k, v, packed([6]), None, None, True, None, None))

    q, k, v = make(1, 4, 8), make(6, 2, 8), make(6, 2, 8)
    yield SampleInput("one_row", (q, k, v, packed([1]), int32([6]), None, True, None, None))
    q, k, v = make(6, 4, 8), make(15, 2, 8), make(15, 2, 8)
    chunk = packed([3, 1, 2]), int32([8, 5, 2]), None
    yield SampleInput("chunk", (q, k, v, *chunk, True, None, None))
    yield SampleInput("chunk_not_causal", (q, k, v, *chunk, False, None, None))
    q, k, v = make(6, 4, 8), make(7, 4, 2, 8), make(7, 4, 2, 8)
    paged = packed([1, 4, 1]), int32([5, 9, 1]), int32([[3, 1, 0], [5, 0, 2], [4, 0, 0]])
    yield SampleInput("paged", (q, k, v, *paged, True, None, None))
    yield SampleInput("paged_window", (q, k, v, *paged, True, 2, None))
    k, v = quantize_kv(k), quantize_kv(v)
    yield SampleInput("paged_int8", (q, k, v, *paged, True, None, None))
    yield SampleInput("paged_int8_window", (q, k, v, *paged, True, 2, None))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor | None,
    block_table: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> None:
    paged = block_table is not None
    check_keys_values("attention", q, k, v, paged)
    if q.dim() != 3 or k.dim() != 3 + paged:
        raise OpError(
            f"attention: q is {tuple(q.shape)}, k {tuple(k.shape)}",
            hint="pass q as (tokens, heads, channels), k and v as packed tokens or blocks of them",
        )
    width = k.shape[-1] - (KV_SCALE_BYTES if k.dtype == torch.int8 else 0)
    if width != q.shape[-1] or q.shape[-2] % k.shape[-2] != 0:
        raise OpError(
            f"attention: q has heads x channels {tuple(q.shape[-2:])}, k {(k.shape[-2], width)}",
            hint="use the same number of channels, and a multiple of the key heads as query heads",
        )
    if paged and context_lens is None:
        raise OpError(
            "attention: a block_table without context_lens",
            hint="pass the number of keys of each sequence",
        )
    if window is not None and window <= 0:
        raise OpError(f"attention: window is {window}", hint="pass a positive window, or None")


def _cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Cost:
    lengths = [
        (len(q_b), len(k_b))
        for q_b, k_b, _ in sequences(q, k, v, cu_seqlens, context_lens, block_table)
    ]
    num_keys = sum(keys for _, keys in lengths)
    pairs = sum(int(visible(*length, causal, window).sum()) for length in lengths)
    row_bytes = k.shape[-2] * k.shape[-1] * k.itemsize
    heads, width = q.shape[-2:]
    return Cost(
        bytes=2 * q.nbytes + 2 * num_keys * row_bytes,
        flops=4 * pairs * heads * width,
    )


@op(check=_check, fake=fake_like, samples=_samples, tolerance=Tolerance(), cost=_cost, row_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T) v for each query, over the keys of its sequence.

    >>> q = k = v = torch.ones(3, 1, 4)
    >>> attention(q, k, v, cu_seqlens=torch.tensor([0, 3])).shape
    torch.Size([3, 1, 4])
    """
    num_heads, width = q.shape[-2:]
    score_scale = width**-0.5 if scale is None else scale
    outputs = [q[:0]]
    for q_QNH, k_KGH, v_KGH in sequences(q, k, v, cu_seqlens, context_lens, block_table):
        if len(q_QNH) == 0:
            continue
        k_KNH = k_KGH.repeat_interleave(num_heads // k_KGH.shape[1], dim=1)
        v_KNH = v_KGH.repeat_interleave(num_heads // v_KGH.shape[1], dim=1)
        mask_QK = visible(len(q_QNH), len(k_KNH), causal, window).to(q.device)
        scores_NQK = torch.einsum("qnh,knh->nqk", q_QNH, k_KNH)
        p_NQK = softmax.reference(scores_NQK, score_scale, mask_QK)
        outputs.append(torch.einsum("nqk,knh->qnh", p_NQK, v_KNH))
    return torch.cat(outputs)


def _padded_samples(make: TensorMaker) -> Iterator[SampleInput]:
    def sample(
        name: str, lengths: list[list[int]], n: int, g: int, h: int, *rest: object
    ) -> SampleInput:
        """Make a batch whose rows alternate between tokens and padding, of these lengths."""
        rows = [
            [bool(i % 2) for i, count in enumerate(row, start=1) for _ in range(count)]
            for row in lengths
        ]
        tokens = make.tensor([[int(t) for t in row] for row in rows], torch.int32).bool()
        b, length = tokens.shape
        q, k, v = (make(b, length, heads, h) for heads in (n, g, g))
        return SampleInput(name, (q, k, v, tokens, *rest))

    yield sample("typical", [[6, 3], [9]], 4, 2, 16, True, None)
    yield sample("large", [[67], [30, 37], [0, 5, 62]], 6, 2, 20, True, None)
    yield sample("odd", [[0, 2, 5], [7], [3, 1, 1, 2]], 3, 1, 11, True, 0.4)
    yield sample("one_row", [[1]], 2, 1, 8, True, None)
    yield sample("not_causal", [[4, 2], [1, 5]], 4, 4, 8, False, None)
    yield sample("no_tokens", [[0, 4], [4]], 2, 2, 8, False, None)
    yield sample("no_padding", [[5], [5]], 2, 2, 8, True, None)
    q, k, v = make(2, 5, 3, 2, 8).unbind(2)
    tokens = make.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()
    yield SampleInput("strided", (q, k, v, tokens, True, None))
    q, k, v = (make.spread(1, 6, 2, 8) for _ in range(3))
    yield SampleInput("extreme", (q, k, v, make.tensor([[1, 1, 1, 1, 0, 0]]).bool(), True, None))


def _check_padded(
    q: Tensor, k: Tensor, v: Tensor, tokens: Tensor, causal: bool, scale: float | None
) -> None:
    check_keys_values("padded_attention", q, k, v, paged=False)
    if q.dim() != 4 or k.dim() != 4 or q.shape[::3] != k.shape[::3] or q.shape[1] != k.shape[1]:
        raise OpError(
            f"padded_attention: q is {tuple(q.shape)}, k {tuple(k.shape)}",
            hint="pass (batch, length, heads, channels), with the same batch, length and channels",
        )
    if q.shape[2] % k.shape[2] != 0:
        raise OpError(
            f"padded_attention: q has {q.shape[2]} heads, k {k.shape[2]}",
            hint="use a multiple of the key heads as query heads",
        )
    if tokens.dtype != torch.bool or tokens.shape != q.shape[:2]:
        raise OpError(
            f"padded_attention: tokens are {tokens.dtype} {tuple(tokens.shape)}",
            hint="pass a bool for each position of the batch, False for padding",
        )


def padded_visible(tokens: Tensor, causal: bool) -> Tensor:
    """Return the attention mask of a padded batch, (B, 1, Q, K), from its tokens (B, K).

    >>> padded_visible(torch.tensor([[True, False]]), causal=True).int()
    tensor([[[[1, 0],
              [1, 0]]]], dtype=torch.int32)
    """
    length = tokens.shape[1]
    seen_QK = visible(length, length, causal, None).to(tokens.device)
    return tokens[:, None, None, :] & seen_QK


def _padded_cost(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: Tensor,
    causal: bool = True,
    scale: float | None = None,
) -> Cost:
    pairs = int(padded_visible(tokens, causal).sum())
    return Cost(
        bytes=2 * q.nbytes + k.nbytes + v.nbytes + tokens.nbytes,
        flops=4 * pairs * q.shape[2] * q.shape[3],
    )


@op(
    check=_check_padded,
    fake=fake_like,
    samples=_padded_samples,
    tolerance=Tolerance(),
    cost=_padded_cost,
    row_args=(),
)
def padded_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tokens: Tensor,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(scale * q k^T) v over the keys at which `tokens` (B, L) is True.

    Queries at padding have a result, too: like `scaled_dot_product_attention` with a mask, each
    attends to the tokens that it may see. It is 0 if there are none.

    >>> q = k = v = torch.ones(1, 3, 1, 4)
    >>> padded_attention(q, k, v, torch.tensor([[True, True, False]])).shape
    torch.Size([1, 3, 1, 4])
    """
    score_scale = q.shape[3] ** -0.5 if scale is None else scale
    k_BKNH = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    v_BKNH = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    scores_BNQK = torch.einsum("bqnh,bknh->bnqk", q, k_BKNH)
    p_BNQK = softmax.reference(scores_BNQK, score_scale, padded_visible(tokens, causal))
    return torch.einsum("bnqk,bknh->bqnh", p_BNQK, v_BKNH)
