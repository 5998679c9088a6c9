"""Tiles of `attention`: their configurations, and which rows and keys they cover.

A tile holds `BLOCK_M` rows of one sequence and one KV head. Its rows are the sequence's queries
times the `GROUP_SIZE` query heads that share the KV head, so a single query of 8 heads is one dot
with 8 rows instead of 8 dots with one row.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ingot.kernels.triton.launch import KernelConfig
from ingot.kernels.triton.linear import input_precision, itemsize
from ingot.kernels.triton.packed import find_sequence
from ingot.kernels.triton.target import TargetSpec


def attention_space(
    target: TargetSpec,
    tiles: Sequence[tuple[int, int, int, int]],
    head_dim: int,
    input_precision: str,
    num_accs: int,
    num_scores: int,
    acc_per_key: bool = False,
) -> Iterator[KernelConfig]:
    """Yield the tiles (BLOCK_M, BLOCK_KV, warps, stages) that fit a target, without duplicates.

    The operands must fit in shared memory, and the accumulators and scores in registers.
    `num_accs` accumulators have one row per query row, or per key with `acc_per_key`.
    """
    configs = (
        _config_if_it_fits(
            target, tile, head_dim, itemsize(input_precision), num_accs, num_scores, acc_per_key
        )
        for tile in tiles
    )
    yield from dict.fromkeys(config for config in configs if config is not None)


def _config_if_it_fits(
    target: TargetSpec,
    tile: tuple[int, int, int, int],
    head_dim: int,
    element_size: int,
    num_accs: int,
    num_scores: int,
    acc_per_key: bool,
) -> KernelConfig | None:
    """Return the configuration of a tile, or None if it is known to spill or to waste work.

    The forward pass has two accumulators, of the current split and of all splits: with 64 rows, 64
    keys and 4 warps these were 192 registers per thread, and all targets spilled. On sm_90 four
    warps multiply 64 rows together, so eight would compute the same scores twice. On gfx942 eight
    warps may use 256 registers each and four may use 512: the backward pass spilled with eight.
    """
    block_m, block_kv, num_warps, num_stages = tile
    is_hip = target.backend == "hip"
    if element_size == 4:
        block_m, block_kv, num_warps, num_stages = 16, 16, 8, 1  # 32 spilled on sm_80 and sm_90
    num_stages = 1 if is_hip else num_stages
    num_threads = num_warps * target.warp_size
    acc_rows = block_kv if acc_per_key else block_m
    registers = num_accs * acc_rows * head_dim + num_scores * block_m * block_kv
    registers //= num_threads
    if target.max_tile_registers < 128:
        registers += block_m * head_dim // 2 // num_threads
    shared_bytes = (2 * block_m + 2 * block_kv * num_stages) * head_dim * element_size
    redundant = target.arch == 90 and acc_rows < 16 * num_warps
    if target.arch == 100 and num_accs == 2 and not acc_per_key:
        redundant = acc_rows < 16 * num_warps  # 64 rows in 8 warps spilled there when decoding
    register_limited = is_hip and num_warps > 4 and (acc_per_key or num_accs == 1)
    fits = shared_bytes <= target.max_shared_bytes and registers <= target.max_tile_registers
    if element_size == 4 or (fits and not redundant and not register_limited):
        return KernelConfig.of(num_warps, num_stages, BLOCK_M=block_m, BLOCK_KV=block_kv)
    return None


@triton.jit
def attends(position, offs_kv, kv_len, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the mask of keys that queries at these positions attend to."""
    visible = (offs_kv < kv_len) & (position >= 0)
    if CAUSAL:
        visible = visible & (offs_kv <= position)
    if WINDOW:
        distance = tl.where(position > offs_kv, position - offs_kv, offs_kv - position)
        visible = visible & (distance < window)
    return visible


@triton.jit
def first_kv_block(min_position, window, WINDOW: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Return the start of the first KV block that is visible from this position on."""
    kv_start = 0
    if WINDOW:
        kv_start = tl.maximum(min_position - window + 1, 0) // BLOCK_KV * BLOCK_KV
    return kv_start


@triton.jit
def last_kv(max_position, kv_len, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the end of the keys that are visible up to this position."""
    kv_end = kv_len
    if CAUSAL:
        kv_end = tl.minimum(kv_end, max_position + 1)
    elif WINDOW:
        kv_end = tl.minimum(kv_end, max_position + window)
    return kv_end


@triton.jit
def query_tile(
    cu_seqlens, context_lens, num_seqs, tile, GROUP_SIZE: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Return a tile's sequence, that sequence's first token, the tile's first row within the
    sequence, and the numbers of queries and keys."""
    seq = find_sequence(cu_seqlens, num_seqs, tile, GROUP_SIZE, BLOCK_M)
    q_start = tl.load(cu_seqlens + seq).to(tl.int32)
    q_len = tl.load(cu_seqlens + seq + 1).to(tl.int32) - q_start
    start_m = (tile - q_start * GROUP_SIZE // BLOCK_M - seq) * BLOCK_M
    kv_len = q_len
    if context_lens is not None:
        kv_len = tl.load(context_lens + seq).to(tl.int32)
    return seq, q_start, start_m, q_len, kv_len


@triton.jit
def row_offsets(
    q_start,
    start_m,
    q_len,
    kv_len,
    num_tokens,
    kv_head,
    GROUP_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return token, head, mask and position of each row of a tile; masked rows have position -1."""
    offs_m = start_m + tl.arange(0, BLOCK_M)
    token = q_start + offs_m // GROUP_SIZE
    mask = (offs_m < q_len * GROUP_SIZE) & (token >= 0) & (token < num_tokens)
    position = tl.where(mask, kv_len - q_len + offs_m // GROUP_SIZE, -1)
    return token.to(tl.int64), kv_head * GROUP_SIZE + offs_m % GROUP_SIZE, mask, position


def with_unit_stride(x: Tensor) -> Tensor:
    """Return x, copied if its last dimension has gaps."""
    return x if x.stride(-1) == 1 else x.contiguous()


def cumulative_kv_lens(cu_seqlens: Tensor, context_lens: Tensor | None) -> Tensor:
    """Return the offset of each sequence's keys among packed keys."""
    if context_lens is None:
        return cu_seqlens
    return torch.cat((context_lens.new_zeros(1), context_lens.cumsum(0))).to(torch.int32)


def shared_constants(q: Tensor, k: Tensor, causal: bool, window: int | None) -> dict[str, Any]:
    """Return the constants that the forward and backward kernels share."""
    return {
        "CAUSAL": causal,
        "WINDOW": window is not None,
        "GROUP_SIZE": q.shape[1] // k.shape[-2],
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[2])),
        "INPUT_PRECISION": input_precision(q.dtype),
    }
