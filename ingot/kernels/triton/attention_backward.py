"""Backward kernels of `attention`: one for the queries, one for keys and values.

The first kernel loops over the keys for the gradient of a tile of queries, the second over the
queries for the gradients of a tile of keys and values. There are no atomics: every gradient is
accumulated in a fixed order.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

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
from ingot.kernels.triton.packed import find_sequence, max_tiles
from ingot.kernels.triton.target import TargetSpec

# BLOCK_M, BLOCK_KV, warps, stages.
_DQ_TILES = ((64, 32, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 32, 4, 1))
_DKV_TILES = ((32, 64, 4, 2), (64, 64, 8, 2), (64, 32, 8, 2), (32, 64, 8, 1), (32, 32, 4, 1))


def _dq_space(
    target: TargetSpec, BLOCK_D: int, INPUT_PRECISION: str, **_: object
) -> Iterator[KernelConfig]:
    yield from attention_space(target, _DQ_TILES, BLOCK_D, INPUT_PRECISION, 1, 3)


def _dkv_space(
    target: TargetSpec, BLOCK_D: int, INPUT_PRECISION: str, **_: object
) -> Iterator[KernelConfig]:
    yield from attention_space(target, _DKV_TILES, BLOCK_D, INPUT_PRECISION, 2, 2, acc_per_key=True)


@kernel(space=_dq_space, bound_by="tensor cores")
@triton.jit
def _attention_dq(
    q, k, v, y, grad_output, lse, delta, grad_q, cu_seqlens, context_lens, cu_kv_lens,
    num_seqs, num_tokens, num_heads, kv_rows, head_dim,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, scale, window,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, GROUP_SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    INPUT_PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_KV: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a tile of queries; store each row's dot of output and grad_output."""
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
        kv_start = first_kv_block(num_context + start_m // GROUP_SIZE, window, WINDOW, BLOCK_KV)
        kv_end = last_kv(num_context + last_row // GROUP_SIZE, kv_len, window, CAUSAL, WINDOW)
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
            visible = attends(position[:, None], offs_kv[None, :], kv_len, window, CAUSAL, WINDOW)
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
    """Compute the gradients of a tile of keys and values over all query heads that share them."""
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
        q_first = 0
        q_last = q_len
        if CAUSAL:
            q_first = tl.maximum(start_kv - num_context, 0)
        elif WINDOW:
            q_first = tl.maximum(start_kv - window + 1 - num_context, 0)
        if WINDOW:
            q_last = tl.minimum(q_last, start_kv + BLOCK_KV - 1 + window - num_context)
        first_m = q_first * GROUP_SIZE // BLOCK_M * BLOCK_M
        for start_m in range(first_m, q_last * GROUP_SIZE, BLOCK_M):
            token, head, mask_m, position = row_offsets(
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
            visible = attends(position[None, :], offs_kv[:, None], kv_len, window, CAUSAL, WINDOW)
            p = tl.exp2(scores * (scale * 1.4426950408889634) - row_lse[None, :])
            p = tl.where(visible, p, 0.0)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=INPUT_PRECISION)
            dp = tl.dot(v_tile, tl.trans(do), input_precision=INPUT_PRECISION)
            ds = (p * (dp - row_delta[None, :])).to(q_tile.dtype)
            dk = tl.dot(ds, q_tile, dk, input_precision=INPUT_PRECISION)
        offs = (kv_offs * tl.num_programs(1) + kv_head) * head_dim + offs_d[None, :]
        tl.store(grad_k + offs, (dk * scale).to(grad_k.dtype.element_ty), kv_mask)
        tl.store(grad_v + offs, dv.to(grad_v.dtype.element_ty), kv_mask)


def attention_backward(
    grad_output: Tensor,
    y: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, given the output and its log-sum-exp."""
    q, k, v = with_unit_stride(q), with_unit_stride(k), with_unit_stride(v)
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    cu_seqlens, num_seqs = cu_seqlens.contiguous(), len(cu_seqlens) - 1
    context_lens = None if context_lens is None else context_lens.contiguous()
    lengths = cu_seqlens, context_lens, cumulative_kv_lens(cu_seqlens, context_lens)
    grad_q, grad_k, grad_v = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    delta = torch.empty_like(lse)
    grad_output = grad_output.contiguous()
    sizes = num_seqs, num_tokens, num_heads, len(k), head_dim
    scalars = *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], scale, window or 0
    constants = shared_constants(q, k, causal, window)
    num_rows = num_tokens * constants["GROUP_SIZE"]
    _attention_dq.launch(
        lambda constants: (max_tiles(num_rows, num_seqs, constants["BLOCK_M"]), num_kv_heads),
        *(q, k, v, y, grad_output, lse, delta, grad_q, *lengths, *sizes, *scalars),
        **constants,
    )
    _attention_dkv.launch(
        lambda constants: (max_tiles(len(k), num_seqs, constants["BLOCK_KV"]), num_kv_heads),
        *(q, k, v, grad_output, lse, delta, grad_k, grad_v, *lengths, *sizes, *scalars),
        **constants,
    )
    return grad_q, grad_k, grad_v
