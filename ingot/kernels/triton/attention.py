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

The host never reads a length: nothing waits for the GPU. Lengths, pages and sites that lie outside
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
from ingot.kernels.triton.kernel import kernel
from ingot.kernels.triton.launch import KernelConfig
from ingot.kernels.triton.linear import input_precision, itemsize
from ingot.kernels.triton.packed import find_sequence, max_tiles
from ingot.kernels.triton.provider import ExampleInputs, provide
from ingot.kernels.triton.target import TargetSpec
from ingot.ops.gradient import differentiate

SPLIT_SIZE = 1024  # keys of a piece
_MIN_PROGRAMS = 256  # programs: with fewer, pieces get programs of their own
_LOG2E = 1.4426950408889634

# Rows, keys, warps, stages.
_TILES = ((128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2))
_DQ_TILES = ((64, 32, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 1))
_DKV_TILES = ((32, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 64, 8, 1), (32, 32, 4, 1))


def _config_if_it_fits(
    target: TargetSpec,
    tile: tuple[int, ...],
    head_dim: int,
    input_precision: str,
    num_accs: int,
    num_scores: int,
    acc_per_key: bool = False,
) -> Iterator[KernelConfig]:
    """A tile, if its operands fit shared memory, and its results and scores registers.

    Results have the tile's rows, or its keys. Forward has two of them, those of a piece and of all
    pieces: with 64 rows, 64 keys and 4 warps that was 192 registers of a thread, and all targets
    spilled. On sm_90 four warps multiply 64 rows together: eight would compute the same scores
    twice. On gfx942 eight warps may have 256 registers each, four have 512: backward spilled with
    eight.
    """
    block_m, block_kv, num_warps, num_stages = tile
    element_size, is_hip = itemsize(input_precision), target.backend == "hip"
    if element_size == 4:
        block_m, block_kv, num_warps, num_stages = 16, 16, 8, 1  # of 32, sm_80 and sm_90 spilled
    num_stages = 1 if is_hip else num_stages
    acc_rows = block_kv if acc_per_key else block_m
    registers = (num_accs * acc_rows * head_dim + num_scores * block_m * block_kv) // (
        num_warps * target.warp_size
    )
    if target.max_tile_registers < 128:
        registers += block_m * head_dim // 2 // (num_warps * target.warp_size)
    shared_bytes = (2 * block_m + 2 * block_kv * num_stages) * head_dim * element_size
    redundant = target.arch == 90 and acc_rows < 16 * num_warps
    if target.arch == 100 and num_accs == 2 and not acc_per_key:
        redundant = acc_rows < 16 * num_warps  # 64 rows in 8 warps spilled there when decoding
    register_limited = is_hip and num_warps > 4 and (acc_per_key or num_accs == 1)
    fits = shared_bytes <= target.max_shared_bytes and registers <= target.max_tile_registers
    if element_size == 4 or (fits and not redundant and not register_limited):
        yield KernelConfig.of(num_warps, num_stages, BLOCK_M=block_m, BLOCK_KV=block_kv)


def _space(
    target: TargetSpec, BLOCK_D: int, INPUT_PRECISION: str, **_: object
) -> Iterator[KernelConfig]:
    configs = (_config_if_it_fits(target, tile, BLOCK_D, INPUT_PRECISION, 2, 2) for tile in _TILES)
    yield from dict.fromkeys(chain.from_iterable(configs))


def _dq_space(
    target: TargetSpec, BLOCK_D: int, INPUT_PRECISION: str, **_: object
) -> Iterator[KernelConfig]:
    configs = (
        _config_if_it_fits(target, tile, BLOCK_D, INPUT_PRECISION, 1, 3) for tile in _DQ_TILES
    )
    yield from dict.fromkeys(chain.from_iterable(configs))


def _dkv_space(
    target: TargetSpec, BLOCK_D: int, INPUT_PRECISION: str, **_: object
) -> Iterator[KernelConfig]:
    configs = (
        _config_if_it_fits(target, tile, BLOCK_D, INPUT_PRECISION, 2, 2, True)
        for tile in _DKV_TILES
    )
    yield from dict.fromkeys(chain.from_iterable(configs))


@triton.jit
def _visible(position, offs_kv, kv_len, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Whether queries at positions (rows) see keys (columns)."""
    visible = (offs_kv < kv_len) & (position >= 0)
    if CAUSAL:
        visible = visible & (offs_kv <= position)
    if WINDOW:
        distance = tl.where(position > offs_kv, position - offs_kv, offs_kv - position)
        visible = visible & (distance < window)
    return visible


@triton.jit
def _first_kv_block(min_position, window, WINDOW: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Where the block of the first key begins that a query at this position sees."""
    kv_start = 0
    if WINDOW:
        kv_start = tl.maximum(min_position - window + 1, 0) // BLOCK_KV * BLOCK_KV
    return kv_start


@triton.jit
def _kv_end(max_position, kv_len, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Behind the last key that a query at this position sees."""
    kv_end = kv_len
    if CAUSAL:
        kv_end = tl.minimum(kv_end, max_position + 1)
    elif WINDOW:
        kv_end = tl.minimum(kv_end, max_position + window)
    return kv_end


@triton.jit
def _query_tile(
    cu_seqlens, context_lens, num_seqs, tile, GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr
):
    """A tile of queries: its sequence, that one's first token, its first row, numbers of queries
    and keys."""
    seq = find_sequence(cu_seqlens, num_seqs, tile, GROUP_SIZE, BLOCK_M)
    q_start = tl.load(cu_seqlens + seq).to(tl.int32)
    q_len = tl.load(cu_seqlens + seq + 1).to(tl.int32) - q_start
    start_m = (tile - q_start * GROUP_SIZE // BLOCK_M - seq) * BLOCK_M
    kv_len = q_len
    if context_lens is not None:
        kv_len = tl.load(context_lens + seq).to(tl.int32)
    return seq, q_start, start_m, q_len, kv_len


@triton.jit
def _row_offsets(
    q_start,
    start_m,
    q_len,
    kv_len,
    num_tokens,
    kv_head,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Token, head and position of each row of a tile; the position is -1 where there is no row."""
    offs_m = start_m + tl.arange(0, BLOCK_M)
    token = q_start + offs_m // GROUP_SIZE
    mask = (offs_m < q_len * GROUP_SIZE) & (token >= 0) & (token < num_tokens)
    position = tl.where(mask, kv_len - q_len + offs_m // GROUP_SIZE, -1)
    return token.to(tl.int64), kv_head * GROUP_SIZE + offs_m % GROUP_SIZE, mask, position


@triton.jit
def _kv_offsets(
    offs_kv,
    kv_base,
    kv_len,
    block_table,
    num_blocks,
    kv_rows,
    stride_b,
    stride_t,
    KV_BLOCK_SIZE: tl.constexpr,
):
    """Where keys lie, and which of them lie anywhere."""
    if KV_BLOCK_SIZE > 0:
        block = tl.load(block_table + offs_kv // KV_BLOCK_SIZE, offs_kv < kv_len, other=-1).to(
            tl.int64
        )
        mask = (offs_kv < kv_len) & (block >= 0) & (block < num_blocks)
        offs = block * stride_b + (offs_kv % KV_BLOCK_SIZE).to(tl.int64) * stride_t
    else:
        mask = (offs_kv < kv_len) & (kv_base + offs_kv < kv_rows)
        offs = (kv_base + offs_kv).to(tl.int64) * stride_t
    return offs, mask


@triton.jit
def _merge(row_max, row_sum, acc, split_max, split_sum, split_acc):
    """Two pieces' maximum, sum and weighted values as one's. Fused multiply-adds are written out,
    so that no compiler makes one where another does not."""
    new_max = tl.maximum(row_max, split_max)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    alpha, beta = tl.exp2(row_max - safe_max), tl.exp2(split_max - safe_max)
    row_sum = tl.fma(row_sum, alpha, split_sum * beta)
    alpha = tl.broadcast_to(alpha[:, None], acc.shape)
    acc = tl.fma(acc, alpha, split_acc * beta[:, None])
    return new_max, row_sum, acc


@triton.jit
def _finalize(row_max, row_sum, acc):
    """The mean of the values, and the logarithm of the sum; 0 and -inf where nothing is seen."""
    empty = row_sum == 0.0
    out = acc / tl.where(empty, 1.0, row_sum)[:, None]
    return out, tl.where(empty, float("-inf"), row_max + tl.log2(row_sum))


@triton.jit
def _attend_range(
    q, k, v, kv_start, kv_end, position, kv_base, kv_len, block_table, num_blocks, kv_rows, kv_head,
    head_dim, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, scale, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and weighted values of the keys from `low` to `high`."""
    offs_d = tl.arange(0, BLOCK_D)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start_kv in range(kv_start, kv_end, BLOCK_KV):
        offs_kv = start_kv + tl.arange(0, BLOCK_KV)
        kv_offs, kv_mask = _kv_offsets(
            offs_kv,
            kv_base,
            kv_len,
            block_table,
            num_blocks,
            kv_rows,
            stride_kb,
            stride_kt,
            KV_BLOCK_SIZE,
        )
        ptrs = k + kv_offs[None, :] + kv_head * stride_kh + offs_d[:, None]
        k_tile = tl.load(ptrs, kv_mask[None, :] & (offs_d < head_dim)[:, None], other=0.0)
        scores = tl.dot(q, k_tile, input_precision=INPUT_PRECISION) * scale
        visible = _visible(position[:, None], offs_kv[None, :], kv_len, window, CAUSAL, WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(scores - safe_max[:, None])
        alpha = tl.exp2(row_max - safe_max)
        row_sum = tl.fma(row_sum, alpha, tl.sum(p, 1))
        row_max = new_max
        kv_offs, kv_mask = _kv_offsets(
            offs_kv,
            kv_base,
            kv_len,
            block_table,
            num_blocks,
            kv_rows,
            stride_vb,
            stride_vt,
            KV_BLOCK_SIZE,
        )
        ptrs = v + kv_offs[:, None] + kv_head * stride_vh + offs_d[None, :]
        v_tile = tl.load(ptrs, kv_mask[:, None] & (offs_d < head_dim)[None, :], other=0.0)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=INPUT_PRECISION)
    return row_max, row_sum, acc


# Trained, prefilled in chunks or decoded: one configuration, or the bits would not be the same.
@kernel(space=_space, bound_by="tensor cores", config_keys=("BLOCK_D", "INPUT_PRECISION"))
@triton.jit
def _attention(
    q, k, v, y, lse, partial_acc, partial_stats, cu_seqlens, context_lens, cu_kv_lens, block_table,
    num_seqs, num_tokens, num_heads, num_blocks, kv_rows, head_dim, num_splits, stride_qt,
    stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_bt, scale,
    window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr,
    GROUP_SIZE: tl.constexpr, MULTI_SPLIT: tl.constexpr, SPLIT_KV: tl.constexpr,
    BLOCK_D: tl.constexpr, SPLIT_SIZE: tl.constexpr, INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """A tile of queries; with `APART`, one piece of its keys alone."""
    kv_head = tl.program_id(1)
    seq, q_start, start_m, q_len, kv_len = _query_tile(
        cu_seqlens, context_lens, num_seqs, tl.program_id(0), GROUP_SIZE, BLOCK_M
    )
    if start_m < q_len * GROUP_SIZE:
        token, head, mask_m, position = _row_offsets(
            q_start, start_m, q_len, kv_len, num_tokens, kv_head, GROUP_SIZE, BLOCK_M
        )
        offs_d = tl.arange(0, BLOCK_D)
        q_mask = mask_m[:, None] & (offs_d < head_dim)[None, :]
        offs = token[:, None] * stride_qt + head[:, None] * stride_qh + offs_d[None, :]
        q_tile = tl.load(q + offs, q_mask, other=0.0)
        kv_base = 0
        if KV_BLOCK_SIZE > 0:
            block_table += seq.to(tl.int64) * stride_bt
        else:
            kv_base = tl.load(cu_kv_lens + seq).to(tl.int32)
        num_context = kv_len - q_len
        last_row = tl.minimum(start_m + BLOCK_M, q_len * GROUP_SIZE) - 1
        kv_start = _first_kv_block(num_context + start_m // GROUP_SIZE, window, WINDOW, BLOCK_KV)
        kv_end = _kv_end(num_context + last_row // GROUP_SIZE, kv_len, window, CAUSAL, WINDOW)
        if SPLIT_KV:
            split = tl.program_id(2)
            split_start = tl.maximum(kv_start, split * SPLIT_SIZE)
            split_end = tl.minimum(kv_end, (split + 1) * SPLIT_SIZE)
            if split * SPLIT_SIZE < kv_len:
                row_max, row_sum, acc = _attend_range(
                    q_tile, k, v, split_start, split_end, position, kv_base, kv_len, block_table,
                    num_blocks, kv_rows, kv_head, head_dim, stride_kb, stride_kt, stride_kh,
                    stride_vb, stride_vt, stride_vh, scale, window,
                    CAUSAL, WINDOW, KV_BLOCK_SIZE, BLOCK_D, INPUT_PRECISION, BLOCK_M, BLOCK_KV,
                )  # fmt: skip
                split_offs = (token * num_heads + head) * num_splits + split
                tl.store(
                    partial_acc + split_offs[:, None] * BLOCK_D + offs_d[None, :],
                    acc,
                    mask_m[:, None],
                )
                tl.store(partial_stats + split_offs * 2, row_max, mask_m)
                tl.store(partial_stats + split_offs * 2 + 1, row_sum, mask_m)
        else:
            if MULTI_SPLIT:
                row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
                row_sum = tl.zeros([BLOCK_M], tl.float32)
                acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                for split in range(kv_start // SPLIT_SIZE, tl.cdiv(kv_end, SPLIT_SIZE)):
                    split_start = tl.maximum(kv_start, split * SPLIT_SIZE)
                    split_end = tl.minimum(kv_end, (split + 1) * SPLIT_SIZE)
                    split_max, split_sum, split_acc = _attend_range(
                        q_tile, k, v, split_start, split_end, position, kv_base, kv_len,
                        block_table, num_blocks, kv_rows, kv_head, head_dim, stride_kb, stride_kt,
                        stride_kh, stride_vb, stride_vt, stride_vh, scale, window,
                        CAUSAL, WINDOW, KV_BLOCK_SIZE, BLOCK_D, INPUT_PRECISION, BLOCK_M, BLOCK_KV,
                    )  # fmt: skip
                    row_max, row_sum, acc = _merge(
                        row_max, row_sum, acc, split_max, split_sum, split_acc
                    )
            else:
                row_max, row_sum, acc = _attend_range(
                    q_tile, k, v, kv_start, kv_end, position, kv_base, kv_len, block_table,
                    num_blocks, kv_rows, kv_head, head_dim, stride_kb, stride_kt, stride_kh,
                    stride_vb, stride_vt, stride_vh, scale, window,
                    CAUSAL, WINDOW, KV_BLOCK_SIZE, BLOCK_D, INPUT_PRECISION, BLOCK_M, BLOCK_KV,
                )  # fmt: skip
            out, row_lse = _finalize(row_max, row_sum, acc)
            offs = (token * num_heads + head)[:, None] * head_dim + offs_d[None, :]
            tl.store(y + offs, out.to(y.dtype.element_ty), q_mask)
            if lse is not None:
                tl.store(lse + token * num_heads + head, row_lse, mask_m)


def _merge_space(target: TargetSpec, **_: object) -> Iterator[KernelConfig]:
    yield KernelConfig.of(1)
    yield KernelConfig.of(2)


@kernel(space=_merge_space, bound_by="latency")
@triton.jit
def _merge_splits(
    partial_acc, partial_stats, y, cu_seqlens, context_lens, num_seqs, num_heads, head_dim,
    num_splits,
    SPLIT_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merge the pieces of one query and head, in order."""
    token, head = tl.program_id(0), tl.program_id(1)
    low = 0
    high = num_seqs
    while low < high:  # the last sequence that begins at this token or before
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle).to(tl.int32) <= token:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    kv_len = tl.load(context_lens + seq).to(tl.int32)
    split_offs = (token.to(tl.int64) * num_heads + head) * num_splits
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    row_max = tl.full([1], float("-inf"), tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_D], tl.float32)
    zero = tl.arange(0, 1)
    for split in range(0, tl.minimum(tl.cdiv(kv_len, SPLIT_SIZE), num_splits)):
        split_acc = tl.load(partial_acc + (split_offs + split) * BLOCK_D + offs_d)
        split_max = tl.load(partial_stats + (split_offs + split) * 2 + zero)
        split_sum = tl.load(partial_stats + (split_offs + split) * 2 + 1 + zero)
        row_max, row_sum, acc = _merge(row_max, row_sum, acc, split_max, split_sum, split_acc)
    out, _ = _finalize(row_max, row_sum, acc)
    ptrs = y + (token.to(tl.int64) * num_heads + head) * head_dim + offs_d
    tl.store(ptrs, out.to(y.dtype.element_ty), offs_d < head_dim)


@kernel(space=_dq_space, bound_by="tensor cores")
@triton.jit
def _attention_dq(
    q, k, v, y, grad_output, lse, delta, grad_q, cu_seqlens, context_lens, cu_kv_lens,
    num_seqs, num_tokens, num_heads, kv_rows, head_dim,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, scale, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries; each row's product of result and gradient is stored."""
    kv_head = tl.program_id(1)
    seq, q_start, start_m, q_len, kv_len = _query_tile(
        cu_seqlens, context_lens, num_seqs, tl.program_id(0), GROUP_SIZE, BLOCK_M
    )
    if start_m < q_len * GROUP_SIZE:
        token, head, mask_m, position = _row_offsets(
            q_start, start_m, q_len, kv_len, num_tokens, kv_head, GROUP_SIZE, BLOCK_M
        )
        offs_d = tl.arange(0, BLOCK_D)
        q_mask = mask_m[:, None] & (offs_d < head_dim)[None, :]
        offs = token[:, None] * stride_qt + head[:, None] * stride_qh + offs_d[None, :]
        q_tile = tl.load(q + offs, q_mask, other=0.0)
        offs = (token * num_heads + head)[:, None] * head_dim + offs_d[None, :]
        do = tl.load(grad_output + offs, q_mask, other=0.0)
        y_tile = tl.load(y + offs, q_mask, other=0.0)
        row_delta = tl.sum(do.to(tl.float32) * y_tile.to(tl.float32), 1)
        tl.store(delta + token * num_heads + head, row_delta, mask_m)
        row_lse = tl.load(lse + token * num_heads + head, mask_m, other=0.0)
        row_lse = tl.where(row_lse == float("-inf"), 0.0, row_lse)
        kv_base = tl.load(cu_kv_lens + seq).to(tl.int32)
        num_context = kv_len - q_len
        last_row = tl.minimum(start_m + BLOCK_M, q_len * GROUP_SIZE) - 1
        kv_start = _first_kv_block(num_context + start_m // GROUP_SIZE, window, WINDOW, BLOCK_KV)
        kv_end = _kv_end(num_context + last_row // GROUP_SIZE, kv_len, window, CAUSAL, WINDOW)
        dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start_kv in range(kv_start, kv_end, BLOCK_KV):
            offs_kv = start_kv + tl.arange(0, BLOCK_KV)
            kv_mask = ((offs_kv < kv_len) & (kv_base + offs_kv < kv_rows))[:, None]
            kv_mask = kv_mask & (offs_d < head_dim)[None, :]
            kv_offs = (kv_base + offs_kv).to(tl.int64)[:, None]
            k_offs = kv_offs * stride_kt + kv_head * stride_kh + offs_d[None, :]
            k_tile = tl.load(k + k_offs, kv_mask, other=0.0)
            v_offs = kv_offs * stride_vt + kv_head * stride_vh + offs_d[None, :]
            v_tile = tl.load(v + v_offs, kv_mask, other=0.0)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=INPUT_PRECISION)
            visible = _visible(position[:, None], offs_kv[None, :], kv_len, window, CAUSAL, WINDOW)
            p = tl.exp2(scores * (scale * 1.4426950408889634) - row_lse[:, None])
            p = tl.where(visible, p, 0.0)
            dp = tl.dot(do, tl.trans(v_tile), input_precision=INPUT_PRECISION)
            ds = (p * (dp - row_delta[:, None])).to(k_tile.dtype)
            dq = tl.dot(ds, k_tile, dq, input_precision=INPUT_PRECISION)
        offs = (token * num_heads + head)[:, None] * head_dim + offs_d[None, :]
        tl.store(grad_q + offs, (dq * scale).to(grad_q.dtype.element_ty), q_mask)


@kernel(space=_dkv_space, bound_by="tensor cores")
@triton.jit
def _attention_dkv(
    q, k, v, grad_output, lse, delta, grad_k, grad_v, cu_seqlens, context_lens, cu_kv_lens,
    num_seqs, num_tokens, num_heads, kv_rows, head_dim,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, scale, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of keys and values, over all queries of all heads that share them."""
    kv_head = tl.program_id(1)
    seq = find_sequence(cu_kv_lens, num_seqs, tl.program_id(0), 1, BLOCK_KV)
    kv_base = tl.load(cu_kv_lens + seq).to(tl.int32)
    kv_len = tl.load(cu_kv_lens + seq + 1).to(tl.int32) - kv_base
    start_kv = (tl.program_id(0) - kv_base // BLOCK_KV - seq) * BLOCK_KV
    if start_kv < kv_len:
        q_start = tl.load(cu_seqlens + seq).to(tl.int32)
        q_len = tl.load(cu_seqlens + seq + 1).to(tl.int32) - q_start
        num_context = kv_len - q_len
        offs_kv = start_kv + tl.arange(0, BLOCK_KV)
        offs_d = tl.arange(0, BLOCK_D)
        kv_mask = ((offs_kv < kv_len) & (kv_base + offs_kv < kv_rows))[:, None]
        kv_mask = kv_mask & (offs_d < head_dim)[None, :]
        kv_offs = (kv_base + offs_kv).to(tl.int64)[:, None]
        offs = kv_offs * stride_kt + kv_head * stride_kh + offs_d[None, :]
        k_tile = tl.load(k + offs, kv_mask, other=0.0)
        offs = kv_offs * stride_vt + kv_head * stride_vh + offs_d[None, :]
        v_tile = tl.load(v + offs, kv_mask, other=0.0)
        dk = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_KV, BLOCK_D], tl.float32)
        q_start_row = 0
        q_end_row = q_len
        if CAUSAL:
            q_start_row = tl.maximum(start_kv - num_context, 0)
        elif WINDOW:
            q_start_row = tl.maximum(start_kv - window + 1 - num_context, 0)
        if WINDOW:
            q_end_row = tl.minimum(q_end_row, start_kv + BLOCK_KV - 1 + window - num_context)
        for start_m in range(
            q_start_row * GROUP_SIZE // BLOCK_M * BLOCK_M, q_end_row * GROUP_SIZE, BLOCK_M
        ):
            token, head, mask_m, position = _row_offsets(
                q_start, start_m, q_len, kv_len, num_tokens, kv_head, GROUP_SIZE, BLOCK_M
            )
            q_mask = mask_m[:, None] & (offs_d < head_dim)[None, :]
            q_offs = token[:, None] * stride_qt + head[:, None] * stride_qh + offs_d[None, :]
            q_tile = tl.load(q + q_offs, q_mask, other=0.0)
            do_offs = (token * num_heads + head)[:, None] * head_dim + offs_d[None, :]
            do = tl.load(grad_output + do_offs, q_mask, other=0.0)
            row_lse = tl.load(lse + token * num_heads + head, mask_m, other=0.0)
            row_lse = tl.where(row_lse == float("-inf"), 0.0, row_lse)
            row_delta = tl.load(delta + token * num_heads + head, mask_m, other=0.0)
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=INPUT_PRECISION)
            visible = _visible(position[None, :], offs_kv[:, None], kv_len, window, CAUSAL, WINDOW)
            p = tl.exp2(scores * (scale * 1.4426950408889634) - row_lse[None, :])
            p = tl.where(visible, p, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=INPUT_PRECISION)
            dp = tl.dot(v_tile, tl.trans(do), input_precision=INPUT_PRECISION)
            ds = (p * (dp - row_delta[None, :])).to(q_tile.dtype)
            dk = tl.dot(ds, q_tile, dk, input_precision=INPUT_PRECISION)
        offs = (kv_offs * tl.num_programs(1) + kv_head) * head_dim + offs_d[None, :]
        tl.store(grad_k + offs, (dk * scale).to(grad_k.dtype.element_ty), kv_mask)
        tl.store(grad_v + offs, dv.to(grad_v.dtype.element_ty), kv_mask)


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _cu_kv_lens(cu_seqlens: Tensor, context_lens: Tensor | None) -> Tensor:
    """Where each sequence's keys begin among packed ones."""
    if context_lens is None:
        return cu_seqlens
    return torch.cat((context_lens.new_zeros(1), context_lens.cumsum(0))).to(torch.int32)


def _constants(q: Tensor, k: Tensor, causal: bool, window: int | None) -> dict[str, Any]:
    return {
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "GROUP_SIZE": q.shape[1] // k.shape[-2],
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[2])),
        "INPUT_PRECISION": input_precision(q.dtype),
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
    q, k, v = _with_unit_stride(q), _with_unit_stride(k), _with_unit_stride(v)
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[-2]
    num_seqs = len(cu_seqlens) - 1
    constants = _constants(q, k, causal, window)
    paged = block_table is not None
    kv_block_size = k.shape[1] if paged else 0
    max_kv_len = block_table.shape[1] * kv_block_size if paged else len(k)
    num_splits = triton.cdiv(max_kv_len, SPLIT_SIZE)
    num_rows = num_tokens * constants["GROUP_SIZE"]
    underfilled = max_tiles(num_rows, num_seqs, 64) * num_kv_heads < _MIN_PROGRAMS
    split_kv = underfilled and num_splits > 1 and context_lens is not None and not with_lse
    y = q.new_empty(q.shape)
    lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32) if with_lse else None
    partial_acc = partial_stats = None
    if split_kv:
        shape = num_tokens, num_heads, num_splits
        partial_acc = q.new_empty((*shape, constants["BLOCK_D"]), dtype=torch.float32)
        partial_stats = q.new_empty((*shape, 2), dtype=torch.float32)
    cu_seqlens = cu_seqlens.contiguous()
    context_lens = None if context_lens is None else context_lens.contiguous()
    _attention.launch(
        lambda all: (
            max_tiles(num_rows, num_seqs, all["BLOCK_M"]),
            num_kv_heads,
            num_splits if split_kv else 1,
        ),
        *(q, k, v, y, lse, partial_acc, partial_stats, cu_seqlens, context_lens),
        None if paged else _cu_kv_lens(cu_seqlens, context_lens),
        _with_unit_stride(block_table) if paged else None,
        *(num_seqs, num_tokens, num_heads, len(k), len(k), head_dim, num_splits),
        *(*q.stride()[:2], *(0, *k.stride()[:-1])[-3:], *(0, *v.stride()[:-1])[-3:]),
        block_table.stride(0) if paged else 0,
        (head_dim**-0.5 if scale is None else scale) * _LOG2E,
        window or 0,
        KV_BLOCK_SIZE=kv_block_size,
        MULTI_SPLIT=num_splits > 1 and not split_kv,
        SPLIT_KV=split_kv,
        SPLIT_SIZE=SPLIT_SIZE,
        **constants,
    )
    if split_kv:
        _merge_splits.launch(
            (num_tokens, num_heads),
            *(
                partial_acc,
                partial_stats,
                y,
                cu_seqlens,
                context_lens,
                num_seqs,
                num_heads,
                head_dim,
                num_splits,
            ),
            SPLIT_SIZE=SPLIT_SIZE,
            BLOCK_D=constants["BLOCK_D"],
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
    q, k, v = _with_unit_stride(q), _with_unit_stride(k), _with_unit_stride(v)
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    cu_seqlens, num_seqs = cu_seqlens.contiguous(), len(cu_seqlens) - 1
    context_lens = None if context_lens is None else context_lens.contiguous()
    cu_kv_lens = _cu_kv_lens(cu_seqlens, context_lens)
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    delta = torch.empty_like(lse)
    grad_output = grads[0].contiguous()
    sizes = num_seqs, num_tokens, num_heads, len(k), head_dim
    scalars = (
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        *(head_dim**-0.5 if scale is None else scale, window or 0),
    )
    lengths = cu_seqlens, context_lens, cu_kv_lens
    constants = _constants(q, k, causal, window)
    num_rows = num_tokens * constants["GROUP_SIZE"]
    _attention_dq.launch(
        lambda all: (max_tiles(num_rows, num_seqs, all["BLOCK_M"]), num_kv_heads),
        *(q, k, v, y, grad_output, lse, delta, grad_q, *lengths, *sizes, *scalars),
        **constants,
    )
    _attention_dkv.launch(
        lambda all: (max_tiles(len(k), num_seqs, all["BLOCK_KV"]), num_kv_heads),
        *(q, k, v, grad_output, lse, delta, grad_k, grad_v, *lengths, *sizes, *scalars),
        **constants,
    )
    return [grad_q, grad_k, grad_v, *(None for _ in needs[3:])]


def _supported(q: Tensor, k: Tensor, *_: object) -> bool:
    return q.numel() > 0 and k.numel() > 0 and q.shape[2] <= 128


def _example(make: ExampleInputs) -> tuple[Any, ...]:
    q, k, v = make(8192, 32, 128), make(8192, 8, 128), make(8192, 8, 128)
    return q, k, v, make.offsets(4, 8192, torch.int32), None, None, True, None, None


def _decode_example(make: ExampleInputs) -> tuple[Any, ...]:
    q, pool = make(16, 32, 128), make(8192, 16, 8, 128)
    contexts = torch.full((16,), 8192, dtype=torch.int32, device=make.device)
    table = make.ints(16, 512, dtype=torch.int32, below=8192)
    return q, pool, pool, make.offsets(16, 16, torch.int32), contexts, table, True, None, None


# Four sequences of 2048 tokens.
_PAIRS = 4 * 2048 * 2049 // 2
_BYTES = 2 * (2 * 8192 * 32 + 2 * 8192 * 8) * 128
provide(
    ops.attention,
    attention,
    example=_example,
    supports=_supported,
    backward=_backward,
    extra_examples=(_decode_example,),
    cost=(_BYTES, 4 * _PAIRS * 32 * 128),
)
