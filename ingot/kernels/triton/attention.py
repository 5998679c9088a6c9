"""`attention` on GPUs: after FlashAttention (Dao et al. 2022), for packed and for paged keys.

A tile of queries walks along its sequence's keys, `KEYS` at a time, with a running maximum and sum;
scores are never in memory. The rows of a tile are queries times the heads that share a key head, so
that a single query of 8 heads is one product of 8 rows and not 8 products of one.

Exact: keys are taken in blocks that are counted from the sequence's first key, and after every
`SPLIT` keys the running values begin anew; what the pieces give is merged in order (`_merge`). Few
queries over many keys, as in decoding, have a program for each piece, and a second kernel merges
them: the same operations in the same order, so the same bits. Blocks that a query does not see
change nothing, whoever walks through them.

Backward runs the forward once more for its statistics, then one kernel walks along the keys for the
gradient of the queries, and one along the queries for those of keys and values. No atomics: each
gradient is added up in one order. Paged keys have no gradient here.

The host never reads a length: nothing waits for the GPU. Lengths, pages and places that lie outside
are not read and not written.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ingot import ops
from ingot.kernels.triton.kernel import Config, kernel
from ingot.kernels.triton.linear import itemsize, precision
from ingot.kernels.triton.packed import owner, tiles
from ingot.kernels.triton.provider import Meta, provide
from ingot.kernels.triton.target import Target
from ingot.ops.gradient import differentiate

SPLIT = 1024  # keys of a piece
_FEW = 256  # programs: with fewer, pieces get programs of their own
_LOG2E = 1.4426950408889634

# Rows, keys, warps, stages.
_TILES = ((128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2))
_QUERY_TILES = ((64, 32, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 1))
_KEY_TILES = ((32, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 64, 8, 1), (32, 32, 4, 1))


def _fitting(
    target: Target,
    tile: tuple[int, ...],
    width: int,
    precision: str,
    results: int,
    scores: int,
    by_keys: bool = False,
) -> Iterator[Config]:
    """A tile, if its operands fit shared memory, and its results and scores registers.

    Results have the tile's rows, or its keys. Forward has two of them, those of a piece and of all
    pieces: with 64 rows, 64 keys and 4 warps that was 192 registers of a thread, and all targets
    spilled. On sm_90 four warps multiply 64 rows together: eight would compute the same scores
    twice. On gfx942 eight warps may have 256 registers each, four have 512: backward spilled with
    eight.
    """
    rows, keys, warps, stages = tile
    size, amd = itemsize(precision), target.backend == "hip"
    if size == 4:
        rows, keys, warps, stages = 16, 16, 8, 1  # of 32, sm_80 and sm_90 spilled
    stages = 1 if amd else stages
    long = keys if by_keys else rows
    held = (results * long * width + scores * rows * keys) // (warps * target.lanes)
    if target.tile_registers < 128:
        held += rows * width // 2 // (warps * target.lanes)
    shared = (2 * rows + 2 * keys * stages) * width * size
    twice = target.arch == 90 and long < 16 * warps
    if target.arch == 100 and results == 2 and not by_keys:
        twice = long < 16 * warps  # 64 rows in 8 warps spilled there when decoding
    crowded = amd and warps > 4 and (by_keys or results == 1)
    fits = shared <= target.shared_program and held <= target.tile_registers
    if size == 4 or (fits and not twice and not crowded):
        yield Config.of(warps, stages, ROWS=rows, KEYS=keys)


def _space(target: Target, WIDTH: int, PRECISION: str, **_: object) -> Iterator[Config]:
    found = (_fitting(target, tile, WIDTH, PRECISION, 2, 2) for tile in _TILES)
    yield from dict.fromkeys(chain.from_iterable(found))


def _query_space(target: Target, WIDTH: int, PRECISION: str, **_: object) -> Iterator[Config]:
    found = (_fitting(target, tile, WIDTH, PRECISION, 1, 3) for tile in _QUERY_TILES)
    yield from dict.fromkeys(chain.from_iterable(found))


def _key_space(target: Target, WIDTH: int, PRECISION: str, **_: object) -> Iterator[Config]:
    found = (_fitting(target, tile, WIDTH, PRECISION, 2, 2, True) for tile in _KEY_TILES)
    yield from dict.fromkeys(chain.from_iterable(found))


@triton.jit
def _sees(position, key, num_keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether queries at positions (rows) see keys (columns)."""
    seen = (key < num_keys) & (position >= 0)
    if CAUSAL:
        seen = seen & (key <= position)
    if WINDOW:
        apart = tl.where(position > key, position - key, key - position)
        seen = seen & (apart < window)
    return seen


@triton.jit
def _first_key(lowest, window, WINDOW: tl.constexpr, KEYS: tl.constexpr):
    """Where the block of the first key begins that a query at this position sees."""
    first = 0
    if WINDOW:
        first = tl.maximum(lowest - window + 1, 0) // KEYS * KEYS
    return first


@triton.jit
def _last_key(highest, num_keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Behind the last key that a query at this position sees."""
    last = num_keys
    if CAUSAL:
        last = tl.minimum(last, highest + 1)
    elif WINDOW:
        last = tl.minimum(last, highest + window)
    return last


@triton.jit
def _tile(starts, contexts, sequences, tile, EACH: tl.constexpr, ROWS: tl.constexpr):
    """A tile of queries: its sequence, that one's first token, its first row, numbers of queries
    and keys."""
    sequence = owner(starts, sequences, tile, EACH, ROWS)
    start = tl.load(starts + sequence).to(tl.int32)
    num_queries = tl.load(starts + sequence + 1).to(tl.int32) - start
    first = (tile - start * EACH // ROWS - sequence) * ROWS
    num_keys = num_queries
    if contexts is not None:
        num_keys = tl.load(contexts + sequence).to(tl.int32)
    return sequence, start, first, num_queries, num_keys


@triton.jit
def _rows(
    start, first, num_queries, num_keys, tokens, key_head, EACH: tl.constexpr, ROWS: tl.constexpr
):
    """Token, head and position of each row of a tile; the position is -1 where there is no row."""
    row = first + tl.arange(0, ROWS)
    token = start + row // EACH
    inside = (row < num_queries * EACH) & (token >= 0) & (token < tokens)
    position = tl.where(inside, num_keys - num_queries + row // EACH, -1)
    return token.to(tl.int64), key_head * EACH + row % EACH, inside, position


@triton.jit
def _places(
    key, base, num_keys, table, pages, total, page_stride, token_stride, PAGE: tl.constexpr
):
    """Where keys lie, and which of them lie anywhere."""
    if PAGE > 0:
        page = tl.load(table + key // PAGE, key < num_keys, other=-1).to(tl.int64)
        there = (key < num_keys) & (page >= 0) & (page < pages)
        place = page * page_stride + (key % PAGE).to(tl.int64) * token_stride
    else:
        there = (key < num_keys) & (base + key < total)
        place = (base + key).to(tl.int64) * token_stride
    return place, there


@triton.jit
def _merge(largest, total, result, more_largest, more_total, more):
    """Two pieces' maximum, sum and weighted values as one's. Fused multiply-adds are written out,
    so that no compiler makes one where another does not."""
    now = tl.maximum(largest, more_largest)
    base = tl.where(now == float("-inf"), 0.0, now)
    one, other = tl.exp2(largest - base), tl.exp2(more_largest - base)
    total = tl.fma(total, one, more_total * other)
    one = tl.broadcast_to(one[:, None], result.shape)
    result = tl.fma(result, one, more * other[:, None])
    return now, total, result


@triton.jit
def _finish(largest, total, result):
    """The mean of the values, and the logarithm of the sum; 0 and -inf where nothing is seen."""
    nothing = total == 0.0
    mean = result / tl.where(nothing, 1.0, total)[:, None]
    return mean, tl.where(nothing, float("-inf"), largest + tl.log2(total))


@triton.jit
def _piece(
    q, k, v, low, high, position, base, num_keys, table, pages, keys_total, key_head, width,
    k_page, k_token, k_head, v_page, v_token, v_head, scale, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted values of the keys from `low` to `high`."""
    channel = tl.arange(0, WIDTH)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    for first in range(low, high, KEYS):
        key = first + tl.arange(0, KEYS)
        place, there = _places(key, base, num_keys, table, pages, keys_total, k_page, k_token, PAGE)
        at = k + place[None, :] + key_head * k_head + channel[:, None]
        keys = tl.load(at, there[None, :] & (channel < width)[:, None], other=0.0)
        scores = tl.dot(q, keys, input_precision=PRECISION) * scale
        seen = _sees(position[:, None], key[None, :], num_keys, window, CAUSAL, WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        now = tl.maximum(largest, tl.max(scores, 1))
        relative = tl.where(now == float("-inf"), 0.0, now)
        p = tl.exp2(scores - relative[:, None])
        shrunk = tl.exp2(largest - relative)
        total = tl.fma(total, shrunk, tl.sum(p, 1))
        largest = now
        place, there = _places(key, base, num_keys, table, pages, keys_total, v_page, v_token, PAGE)
        at = v + place[:, None] + key_head * v_head + channel[None, :]
        values = tl.load(at, there[:, None] & (channel < width)[None, :], other=0.0)
        result = result * shrunk[:, None]
        result = tl.dot(p.to(values.dtype), values, result, input_precision=PRECISION)
    return largest, total, result


# Trained, prefilled in chunks or decoded: one configuration, or the bits would not be the same.
@kernel(space=_space, bound="tensor cores", keys=("WIDTH", "PRECISION"))
@triton.jit
def _attention(
    q, k, v, y, lse, pieces, piece_sums, starts, contexts, key_starts, table,
    sequences, tokens, heads, pages, keys_total, width, num_pieces,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, table_row, scale, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, EACH: tl.constexpr,
    MANY: tl.constexpr, APART: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A tile of queries; with `APART`, one piece of its keys alone."""
    key_head = tl.program_id(1)
    sequence, start, first, num_queries, num_keys = _tile(
        starts, contexts, sequences, tl.program_id(0), EACH, ROWS
    )
    if first < num_queries * EACH:
        token, head, inside, position = _rows(
            start, first, num_queries, num_keys, tokens, key_head, EACH, ROWS
        )
        channel = tl.arange(0, WIDTH)
        within = inside[:, None] & (channel < width)[None, :]
        at = token[:, None] * q_token + head[:, None] * q_head + channel[None, :]
        queries = tl.load(q + at, within, other=0.0)
        base = 0
        if PAGE > 0:
            table += sequence.to(tl.int64) * table_row
        else:
            base = tl.load(key_starts + sequence).to(tl.int32)
        before = num_keys - num_queries
        ends = tl.minimum(first + ROWS, num_queries * EACH) - 1
        low = _first_key(before + first // EACH, window, WINDOW, KEYS)
        high = _last_key(before + ends // EACH, num_keys, window, CAUSAL, WINDOW)
        if APART:
            piece = tl.program_id(2)
            from_key = tl.maximum(low, piece * SPLIT)
            to_key = tl.minimum(high, (piece + 1) * SPLIT)
            if piece * SPLIT < num_keys:
                largest, total, result = _piece(
                    queries, k, v, from_key, to_key, position, base, num_keys, table, pages,
                    keys_total, key_head, width, k_page, k_token, k_head, v_page, v_token, v_head,
                    scale, window, CAUSAL, WINDOW, PAGE, WIDTH, PRECISION, ROWS, KEYS,
                )  # fmt: skip
                place = (token * heads + head) * num_pieces + piece
                tl.store(
                    pieces + place[:, None] * WIDTH + channel[None, :], result, inside[:, None]
                )
                tl.store(piece_sums + place * 2, largest, inside)
                tl.store(piece_sums + place * 2 + 1, total, inside)
        else:
            if MANY:
                largest = tl.full([ROWS], float("-inf"), tl.float32)
                total = tl.zeros([ROWS], tl.float32)
                result = tl.zeros([ROWS, WIDTH], tl.float32)
                for piece in range(low // SPLIT, tl.cdiv(high, SPLIT)):
                    from_key = tl.maximum(low, piece * SPLIT)
                    to_key = tl.minimum(high, (piece + 1) * SPLIT)
                    more_largest, more_total, more = _piece(
                        queries, k, v, from_key, to_key, position, base, num_keys, table, pages,
                        keys_total, key_head, width, k_page, k_token, k_head, v_page, v_token,
                        v_head, scale, window, CAUSAL, WINDOW, PAGE, WIDTH, PRECISION, ROWS, KEYS,
                    )  # fmt: skip
                    largest, total, result = _merge(
                        largest, total, result, more_largest, more_total, more
                    )
            else:
                largest, total, result = _piece(
                    queries, k, v, low, high, position, base, num_keys, table, pages, keys_total,
                    key_head, width, k_page, k_token, k_head, v_page, v_token, v_head, scale,
                    window, CAUSAL, WINDOW, PAGE, WIDTH, PRECISION, ROWS, KEYS,
                )  # fmt: skip
            mean, log = _finish(largest, total, result)
            at = (token * heads + head)[:, None] * width + channel[None, :]
            tl.store(y + at, mean.to(y.dtype.element_ty), within)
            if lse is not None:
                tl.store(lse + token * heads + head, log, inside)


def _merge_space(target: Target, **_: object) -> Iterator[Config]:
    yield Config.of(1)
    yield Config.of(2)


@kernel(space=_merge_space, bound="latency")
@triton.jit
def _merge_pieces(
    pieces, piece_sums, y, starts, contexts, sequences, heads, width, num_pieces,
    SPLIT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of one query and head, in order."""
    token, head = tl.program_id(0), tl.program_id(1)
    low = 0
    high = sequences
    while low < high:  # the last sequence that begins at this token or before
        middle = (low + high) // 2
        if tl.load(starts + middle).to(tl.int32) <= token:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    num_keys = tl.load(contexts + sequence).to(tl.int32)
    place = (token.to(tl.int64) * heads + head) * num_pieces
    channel = tl.arange(0, WIDTH)[None, :]
    largest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    result = tl.zeros([1, WIDTH], tl.float32)
    one = tl.arange(0, 1)
    for piece in range(0, tl.minimum(tl.cdiv(num_keys, SPLIT), num_pieces)):
        more = tl.load(pieces + (place + piece) * WIDTH + channel)
        more_largest = tl.load(piece_sums + (place + piece) * 2 + one)
        more_total = tl.load(piece_sums + (place + piece) * 2 + 1 + one)
        largest, total, result = _merge(largest, total, result, more_largest, more_total, more)
    mean, _ = _finish(largest, total, result)
    at = y + (token.to(tl.int64) * heads + head) * width + channel
    tl.store(at, mean.to(y.dtype.element_ty), channel < width)


@kernel(space=_query_space, bound="tensor cores")
@triton.jit
def _attention_queries(
    q, k, v, y, grad, lse, delta, q_grad, starts, contexts, key_starts,
    sequences, tokens, heads, keys_total, width,
    q_token, q_head, k_token, k_head, v_token, v_head, scale, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries; each row's product of result and gradient is stored."""
    key_head = tl.program_id(1)
    sequence, start, first, num_queries, num_keys = _tile(
        starts, contexts, sequences, tl.program_id(0), EACH, ROWS
    )
    if first < num_queries * EACH:
        token, head, inside, position = _rows(
            start, first, num_queries, num_keys, tokens, key_head, EACH, ROWS
        )
        channel = tl.arange(0, WIDTH)
        within = inside[:, None] & (channel < width)[None, :]
        at = token[:, None] * q_token + head[:, None] * q_head + channel[None, :]
        queries = tl.load(q + at, within, other=0.0)
        at = (token * heads + head)[:, None] * width + channel[None, :]
        given = tl.load(grad + at, within, other=0.0)
        means = tl.load(y + at, within, other=0.0)
        inner = tl.sum(given.to(tl.float32) * means.to(tl.float32), 1)
        tl.store(delta + token * heads + head, inner, inside)
        log = tl.load(lse + token * heads + head, inside, other=0.0)
        log = tl.where(log == float("-inf"), 0.0, log)
        base = tl.load(key_starts + sequence).to(tl.int32)
        before = num_keys - num_queries
        ends = tl.minimum(first + ROWS, num_queries * EACH) - 1
        low = _first_key(before + first // EACH, window, WINDOW, KEYS)
        high = _last_key(before + ends // EACH, num_keys, window, CAUSAL, WINDOW)
        total = tl.zeros([ROWS, WIDTH], tl.float32)
        for first_key in range(low, high, KEYS):
            key = first_key + tl.arange(0, KEYS)
            there = ((key < num_keys) & (base + key < keys_total))[:, None]
            there = there & (channel < width)[None, :]
            place = (base + key).to(tl.int64)[:, None]
            k_at = place * k_token + key_head * k_head + channel[None, :]
            keys = tl.load(k + k_at, there, other=0.0)
            v_at = place * v_token + key_head * v_head + channel[None, :]
            values = tl.load(v + v_at, there, other=0.0)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            seen = _sees(position[:, None], key[None, :], num_keys, window, CAUSAL, WINDOW)
            p = tl.exp2(scores * (scale * 1.4426950408889634) - log[:, None])
            p = tl.where(seen, p, 0.0)
            of_p = tl.dot(given, tl.trans(values), input_precision=PRECISION)
            of_scores = (p * (of_p - inner[:, None])).to(keys.dtype)
            total = tl.dot(of_scores, keys, total, input_precision=PRECISION)
        at = (token * heads + head)[:, None] * width + channel[None, :]
        tl.store(q_grad + at, (total * scale).to(q_grad.dtype.element_ty), within)


@kernel(space=_key_space, bound="tensor cores")
@triton.jit
def _attention_keys(
    q, k, v, grad, lse, delta, k_grad, v_grad, starts, contexts, key_starts,
    sequences, tokens, heads, keys_total, width,
    q_token, q_head, k_token, k_head, v_token, v_head, scale, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, EACH: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values, over all queries of all heads that share them."""
    key_head = tl.program_id(1)
    sequence = owner(key_starts, sequences, tl.program_id(0), 1, KEYS)
    base = tl.load(key_starts + sequence).to(tl.int32)
    num_keys = tl.load(key_starts + sequence + 1).to(tl.int32) - base
    first = (tl.program_id(0) - base // KEYS - sequence) * KEYS
    if first < num_keys:
        start = tl.load(starts + sequence).to(tl.int32)
        num_queries = tl.load(starts + sequence + 1).to(tl.int32) - start
        before = num_keys - num_queries
        key = first + tl.arange(0, KEYS)
        channel = tl.arange(0, WIDTH)
        there = ((key < num_keys) & (base + key < keys_total))[:, None]
        there = there & (channel < width)[None, :]
        place = (base + key).to(tl.int64)[:, None]
        at = place * k_token + key_head * k_head + channel[None, :]
        keys = tl.load(k + at, there, other=0.0)
        at = place * v_token + key_head * v_head + channel[None, :]
        values = tl.load(v + at, there, other=0.0)
        of_keys = tl.zeros([KEYS, WIDTH], tl.float32)
        of_values = tl.zeros([KEYS, WIDTH], tl.float32)
        low = 0
        high = num_queries
        if CAUSAL:
            low = tl.maximum(first - before, 0)
        elif WINDOW:
            low = tl.maximum(first - window + 1 - before, 0)
        if WINDOW:
            high = tl.minimum(high, first + KEYS - 1 + window - before)
        for row in range(low * EACH // ROWS * ROWS, high * EACH, ROWS):
            token, head, inside, position = _rows(
                start, row, num_queries, num_keys, tokens, key_head, EACH, ROWS
            )
            within = inside[:, None] & (channel < width)[None, :]
            q_at = token[:, None] * q_token + head[:, None] * q_head + channel[None, :]
            queries = tl.load(q + q_at, within, other=0.0)
            grad_at = (token * heads + head)[:, None] * width + channel[None, :]
            given = tl.load(grad + grad_at, within, other=0.0)
            log = tl.load(lse + token * heads + head, inside, other=0.0)
            log = tl.where(log == float("-inf"), 0.0, log)
            inner = tl.load(delta + token * heads + head, inside, other=0.0)
            scores = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
            seen = _sees(position[None, :], key[:, None], num_keys, window, CAUSAL, WINDOW)
            p = tl.exp2(scores * (scale * 1.4426950408889634) - log[None, :])
            p = tl.where(seen, p, 0.0)
            of_values = tl.dot(p.to(given.dtype), given, of_values, input_precision=PRECISION)
            of_p = tl.dot(values, tl.trans(given), input_precision=PRECISION)
            of_scores = (p * (of_p - inner[None, :])).to(queries.dtype)
            of_keys = tl.dot(of_scores, queries, of_keys, input_precision=PRECISION)
        at = (place * tl.num_programs(1) + key_head) * width + channel[None, :]
        tl.store(k_grad + at, (of_keys * scale).to(k_grad.dtype.element_ty), there)
        tl.store(v_grad + at, of_values.to(v_grad.dtype.element_ty), there)


def _side_by_side(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _key_starts(cu_seqlens: Tensor, context_lens: Tensor | None) -> Tensor:
    """Where each sequence's keys begin among packed ones."""
    if context_lens is None:
        return cu_seqlens
    return torch.cat((context_lens.new_zeros(1), context_lens.cumsum(0))).to(torch.int32)


def _constants(q: Tensor, k: Tensor, causal: bool, window: int | None) -> dict[str, Any]:
    return {
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "EACH": q.shape[1] // k.shape[-2],
        "WIDTH": max(16, triton.next_power_of_2(q.shape[2])),
        "PRECISION": precision(q.dtype),
    }


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor | None,
    block_table: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    q, k, v = _side_by_side(q), _side_by_side(k), _side_by_side(v)
    (tokens, heads, width), key_heads = q.shape, k.shape[-2]
    sequences = len(cu_seqlens) - 1
    constants = _constants(q, k, causal, window)
    paged = block_table is not None
    page = k.shape[1] if paged else 0
    most_keys = block_table.shape[1] * page if paged else len(k)
    num_pieces = triton.cdiv(most_keys, SPLIT)
    rows = tokens * constants["EACH"]
    few = tiles(rows, sequences, 64) * key_heads < _FEW
    apart = few and num_pieces > 1 and context_lens is not None and not with_lse
    y = q.new_empty(q.shape)
    lse = q.new_empty((tokens, heads), dtype=torch.float32) if with_lse else None
    pieces = sums = None
    if apart:
        shape = tokens, heads, num_pieces
        pieces = q.new_empty((*shape, constants["WIDTH"]), dtype=torch.float32)
        sums = q.new_empty((*shape, 2), dtype=torch.float32)
    starts = cu_seqlens.contiguous()
    contexts = None if context_lens is None else context_lens.contiguous()
    _attention.launch(
        lambda all: (
            tiles(rows, sequences, all["ROWS"]),
            key_heads,
            num_pieces if apart else 1,
        ),
        *(q, k, v, y, lse, pieces, sums, starts, contexts),
        None if paged else _key_starts(starts, contexts),
        _side_by_side(block_table) if paged else None,
        *(sequences, tokens, heads, len(k), len(k), width, num_pieces),
        *(*q.stride()[:2], *(0, *k.stride()[:-1])[-3:], *(0, *v.stride()[:-1])[-3:]),
        block_table.stride(0) if paged else 0,
        (width**-0.5 if scale is None else scale) * _LOG2E,
        window or 0,
        PAGE=page,
        MANY=num_pieces > 1 and not apart,
        APART=apart,
        SPLIT=SPLIT,
        **constants,
    )
    if apart:
        _merge_pieces.launch(
            (tokens, heads),
            *(pieces, sums, y, starts, contexts, sequences, heads, width, num_pieces),
            SPLIT=SPLIT,
            WIDTH=constants["WIDTH"],
        )
    return y, lse


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor | None,
    block_table: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """One kernel; two where few queries meet many keys."""
    args = q, k, v, cu_seqlens, context_lens, block_table, causal, window, scale
    return _forward(*args, with_lse=False)[0]


def _backward(
    needs: list[bool],
    grads: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor | None,
    block_table: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
) -> Any:
    args = q, k, v, cu_seqlens, context_lens, block_table, causal, window, scale
    if block_table is not None:  # nobody trains through pages: as the reference has it
        return differentiate(ops.attention.fallback)(needs, grads, *args)
    y, lse = _forward(*args, with_lse=True)
    q, k, v = _side_by_side(q), _side_by_side(k), _side_by_side(v)
    (tokens, heads, width), key_heads = q.shape, k.shape[1]
    starts, sequences = cu_seqlens.contiguous(), len(cu_seqlens) - 1
    contexts = None if context_lens is None else context_lens.contiguous()
    key_starts = _key_starts(starts, contexts)
    of_q, of_k, of_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    delta = torch.empty_like(lse)
    grad = grads[0].contiguous()
    sizes = sequences, tokens, heads, len(k), width
    numbers = (
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        *(width**-0.5 if scale is None else scale, window or 0),
    )
    where = starts, contexts, key_starts
    constants = _constants(q, k, causal, window)
    rows = tokens * constants["EACH"]
    _attention_queries.launch(
        lambda all: (tiles(rows, sequences, all["ROWS"]), key_heads),
        *(q, k, v, y, grad, lse, delta, of_q, *where, *sizes, *numbers),
        **constants,
    )
    _attention_keys.launch(
        lambda all: (tiles(len(k), sequences, all["KEYS"]), key_heads),
        *(q, k, v, grad, lse, delta, of_k, of_v, *where, *sizes, *numbers),
        **constants,
    )
    return [of_q, of_k, of_v, *(None for _ in needs[3:])]


def _fits(q: Tensor, k: Tensor, *_: object) -> bool:
    return q.numel() > 0 and k.numel() > 0 and q.shape[2] <= 128


def _example(make: Meta) -> tuple[Any, ...]:
    q, k, v = make(8192, 32, 128), make(8192, 8, 128), make(8192, 8, 128)
    return q, k, v, make.starts(4, 8192, torch.int32), None, None, True, None, None


def _decode_example(make: Meta) -> tuple[Any, ...]:
    q, pool = make(16, 32, 128), make(8192, 16, 8, 128)
    contexts = torch.full((16,), 8192, dtype=torch.int32, device=make.device)
    table = make.ints(16, 512, dtype=torch.int32, below=8192)
    return q, pool, pool, make.starts(16, 16, torch.int32), contexts, table, True, None, None


# Four sequences of 2048 tokens.
_PAIRS = 4 * 2048 * 2049 // 2
_BYTES = 2 * (2 * 8192 * 32 + 2 * 8192 * 8) * 128
provide(
    ops.attention,
    attention,
    example=_example,
    supports=_fits,
    backward=_backward,
    also=(_decode_example,),
    cost=(_BYTES, 4 * _PAIRS * 32 * 128),
)
