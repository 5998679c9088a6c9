"""`attention` on GPUs: FlashAttention (Dao et al. 2022) for packed and for paged keys.

A tile of queries (`attention_tiles.py`) loops over its sequence's keys, `BLOCK_KV` at a time, with
a running maximum and sum; scores are never written to memory.

The result is batch-invariant. KV blocks are counted from the sequence's first key, and after every
`SPLIT_SIZE` keys the running values start again; the results of the splits are merged in order
(`_merge`). Few queries over many keys, as in decoding, use one program per split (split-KV), and a
second kernel merges them with the same operations in the same order, so the bits are equal. KV
blocks that a query cannot attend to do not change its result.

The backward pass recomputes the forward for its log-sum-exp, then runs two kernels
(`attention_backward.py`). Calls with a block table have no backward kernel.

The host never reads a length, so a launch never waits for the GPU. Out-of-range lengths, blocks and
offsets are neither read nor written.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ingot import ops
from ingot.kernels.triton.attention_backward import attention_backward
from ingot.kernels.triton.attention_tiles import (
    attends,
    attention_space,
    cumulative_kv_lens,
    first_kv_block,
    last_kv,
    query_tile,
    row_offsets,
    shared_constants,
    with_unit_stride,
)
from ingot.kernels.triton.kernel import kernel
from ingot.kernels.triton.launch import KernelConfig
from ingot.kernels.triton.packed import max_tiles
from ingot.kernels.triton.provider import ExampleInputs, provide
from ingot.kernels.triton.target import TargetSpec
from ingot.ops.gradient import differentiate

SPLIT_SIZE = 1024  # keys per split
_MIN_PROGRAMS = 256  # with fewer, each split gets its own program
_LOG2E = 1.4426950408889634

# BLOCK_M, BLOCK_KV, warps, stages.
_TILES = ((128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2))


def _space(
    target: TargetSpec, BLOCK_D: int, INPUT_PRECISION: str, **_: object
) -> Iterator[KernelConfig]:
    yield from attention_space(target, _TILES, BLOCK_D, INPUT_PRECISION, 2, 2)


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
    """Return the offsets of keys and the mask of those that exist."""
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
    """Merge the maximum, sum and accumulator of a split. Fused multiply-adds are explicit, so that
    no compiler contracts one in one kernel and not in the other."""
    new_max = tl.maximum(row_max, split_max)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    alpha, beta = tl.exp2(row_max - safe_max), tl.exp2(split_max - safe_max)
    row_sum = tl.fma(row_sum, alpha, split_sum * beta)
    alpha = tl.broadcast_to(alpha[:, None], acc.shape)
    acc = tl.fma(acc, alpha, split_acc * beta[:, None])
    return new_max, row_sum, acc


@triton.jit
def _finalize(row_max, row_sum, acc):
    """Return the output and the log-sum-exp; 0 and -inf for rows that attend to nothing."""
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
    """Return maximum, sum and accumulator of the keys from `kv_start` to `kv_end`."""
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
        visible = attends(position[:, None], offs_kv[None, :], kv_len, window, CAUSAL, WINDOW)
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


@triton.jit
def _attend_splits(
    q, k, v, kv_start, kv_end, position, kv_base, kv_len, block_table, num_blocks, kv_rows, kv_head,
    head_dim, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, scale, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, KV_BLOCK_SIZE: tl.constexpr,
    MULTI_SPLIT: tl.constexpr, SPLIT_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `kv_start` to `kv_end`, split by split if there may be several."""
    if MULTI_SPLIT:
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for split in range(kv_start // SPLIT_SIZE, tl.cdiv(kv_end, SPLIT_SIZE)):
            split_start = tl.maximum(kv_start, split * SPLIT_SIZE)
            split_end = tl.minimum(kv_end, (split + 1) * SPLIT_SIZE)
            split_max, split_sum, split_acc = _attend_range(
                q, k, v, split_start, split_end, position, kv_base, kv_len, block_table,
                num_blocks, kv_rows, kv_head, head_dim, stride_kb, stride_kt, stride_kh,
                stride_vb, stride_vt, stride_vh, scale, window,
                CAUSAL, WINDOW, KV_BLOCK_SIZE, BLOCK_D, INPUT_PRECISION, BLOCK_M, BLOCK_KV,
            )  # fmt: skip
            row_max, row_sum, acc = _merge(row_max, row_sum, acc, split_max, split_sum, split_acc)
    else:
        row_max, row_sum, acc = _attend_range(
            q, k, v, kv_start, kv_end, position, kv_base, kv_len, block_table, num_blocks,
            kv_rows, kv_head, head_dim, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt,
            stride_vh, scale, window,
            CAUSAL, WINDOW, KV_BLOCK_SIZE, BLOCK_D, INPUT_PRECISION, BLOCK_M, BLOCK_KV,
        )  # fmt: skip
    return row_max, row_sum, acc


# Training, chunked prefill and decoding share one configuration: otherwise bits would differ.
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
    """Compute a tile of queries; with `SPLIT_KV`, only one split of its keys."""
    kv_head = tl.program_id(1)
    seq, q_start, start_m, q_len, kv_len = query_tile(
        cu_seqlens, context_lens, num_seqs, tl.program_id(0), GROUP_SIZE, BLOCK_M
    )
    if start_m < q_len * GROUP_SIZE:
        token, head, mask_m, position = row_offsets(
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
        kv_start = first_kv_block(num_context + start_m // GROUP_SIZE, window, WINDOW, BLOCK_KV)
        kv_end = last_kv(num_context + last_row // GROUP_SIZE, kv_len, window, CAUSAL, WINDOW)
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
                acc_ptrs = partial_acc + split_offs[:, None] * BLOCK_D + offs_d[None, :]
                tl.store(acc_ptrs, acc, mask_m[:, None])
                tl.store(partial_stats + split_offs * 2, row_max, mask_m)
                tl.store(partial_stats + split_offs * 2 + 1, row_sum, mask_m)
        else:
            row_max, row_sum, acc = _attend_splits(
                q_tile, k, v, kv_start, kv_end, position, kv_base, kv_len, block_table,
                num_blocks, kv_rows, kv_head, head_dim, stride_kb, stride_kt, stride_kh,
                stride_vb, stride_vt, stride_vh, scale, window, CAUSAL, WINDOW, KV_BLOCK_SIZE,
                MULTI_SPLIT, SPLIT_SIZE, BLOCK_D, INPUT_PRECISION, BLOCK_M, BLOCK_KV,
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
    """Merge the splits of one query and head, in order."""
    token, head = tl.program_id(0), tl.program_id(1)
    low = 0
    high = num_seqs
    while low < high:  # find the last sequence that starts at or before this token
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
    q, k, v = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v)
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[-2]
    num_seqs = len(cu_seqlens) - 1
    constants = shared_constants(q, k, causal, window)
    paged = block_table is not None
    kv_block_size = k.shape[1] if paged else 0
    max_kv_len = block_table.shape[1] * kv_block_size if paged else len(k)
    num_splits = triton.cdiv(max_kv_len, SPLIT_SIZE)
    num_rows = num_tokens * constants["GROUP_SIZE"]
    few_programs = max_tiles(num_rows, num_seqs, 64) * num_kv_heads < _MIN_PROGRAMS
    split_kv = few_programs and num_splits > 1 and context_lens is not None and not with_lse
    y = q.new_empty(q.shape)
    lse = q.new_empty((num_tokens, num_heads), dtype=torch.float32) if with_lse else None
    partial_acc = partial_stats = None
    if split_kv:
        partial_stats = q.new_empty((*q.shape[:2], num_splits, 2), dtype=torch.float32)
        partial_acc = partial_stats.new_empty((*q.shape[:2], num_splits, constants["BLOCK_D"]))
    cu_seqlens = cu_seqlens.contiguous()
    context_lens = None if context_lens is None else context_lens.contiguous()

    def grid(constants: dict[str, Any]) -> tuple[int, int, int]:
        num_tiles = max_tiles(num_rows, num_seqs, constants["BLOCK_M"])
        return num_tiles, num_kv_heads, num_splits if split_kv else 1

    _attention.launch(
        grid,
        *(q, k, v, y, lse, partial_acc, partial_stats, cu_seqlens, context_lens),
        None if paged else cumulative_kv_lens(cu_seqlens, context_lens),
        with_unit_stride(block_table) if paged else None,
        *(num_seqs, num_tokens, num_heads, len(k), len(k), head_dim, num_splits),
        *(*q.stride()[:2], *(0, *k.stride()[:-1])[-3:], *(0, *v.stride()[:-1])[-3:]),
        block_table.stride(0) if paged else 0,
        *((head_dim**-0.5 if scale is None else scale) * _LOG2E, window or 0),
        KV_BLOCK_SIZE=kv_block_size,
        MULTI_SPLIT=num_splits > 1 and not split_kv,
        SPLIT_KV=split_kv,
        SPLIT_SIZE=SPLIT_SIZE,
        **constants,
    )
    if split_kv:
        lengths = cu_seqlens, context_lens, num_seqs
        _merge_splits.launch(
            (num_tokens, num_heads),
            *(partial_acc, partial_stats, y, *lengths, num_heads, head_dim, num_splits),
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
    """Launch one kernel; two for few queries over many keys."""
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
    if block_table is not None:  # training does not use a block table: use the reference
        return differentiate(ops.attention.fallback)(needs, grads, *args)
    y, lse = _forward(*args, with_lse=True)
    assert lse is not None
    scale = q.shape[2] ** -0.5 if scale is None else scale
    grad_qkv = attention_backward(
        grads[0], y, lse, q, k, v, cu_seqlens, context_lens, causal, window, scale
    )
    return [*grad_qkv, *(None for _ in needs[3:])]


def _supported(q: Tensor, k: Tensor, *_: object) -> bool:
    # A KV cache in int8 is read by the CPU kernel only.
    return q.numel() > 0 and k.numel() > 0 and q.shape[2] <= 128 and k.dtype == q.dtype


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
