"""Baseline kernels from Triton's tutorials, to compare the compiled code of ours with.

These are the algorithms of the tutorials 03 (matrix multiplication) and 06 (fused attention), with
the block sizes that those use for large matrices and heads of 128 channels. They support neither
bias, packed sequences, grouped-query attention, sliding windows nor a paged KV cache, and are not
batch-invariant. They are only compiled, so that a table can show the cost of these features.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ingot.kernels.triton.kernel import Kernel
from ingot.kernels.triton.launch import KernelConfig, Launch
from ingot.kernels.triton.provider import ExampleInputs

_GROUP_M = 8  # rows of tiles that are processed together, for L2 reuse


@triton.jit
def _matmul(
    x, weight, y, M, N, K, stride_xm, stride_wn, stride_ym,
    GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of x (M, K) @ weight (N, K).T."""
    pid = tl.program_id(0)
    tiles_per_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    first_m = pid // tiles_per_group * GROUP_M
    group_m = tl.minimum(tl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    offs_m = (first_m + pid % tiles_per_group % group_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid % tiles_per_group // group_m * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x + (offs_m % M)[:, None] * stride_xm + offs_k[None, :]
    w_ptrs = weight + (offs_n % N)[None, :] * stride_wn + offs_k[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_k in range(0, K, BLOCK_K):
        a = tl.load(x_ptrs, (offs_k < K - start_k)[None, :], other=0.0)
        b = tl.load(w_ptrs, (offs_k < K - start_k)[:, None], other=0.0)
        acc = tl.dot(a, b, acc)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    tl.store(y + offs_m[:, None] * stride_ym + offs_n[None, :], acc.to(y.dtype.element_ty), mask)


@triton.jit
def _flash_attention(
    q, k, v, y, seq_len, scale, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """Compute causal attention of a tile of queries; contiguous (heads, seq_len, BLOCK_D)."""
    head_offs = tl.program_id(1).to(tl.int64) * seq_len * BLOCK_D
    offs_d = tl.arange(0, BLOCK_D)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs = head_offs + offs_m[:, None] * BLOCK_D + offs_d[None, :]
    q_tile = tl.load(q + offs, (offs_m < seq_len)[:, None], other=0.0)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start_kv in range(0, tl.minimum((tl.program_id(0) + 1) * BLOCK_M, seq_len), BLOCK_KV):
        offs_kv = start_kv + tl.arange(0, BLOCK_KV)
        kv_mask = offs_kv < seq_len
        k_tile = tl.load(
            k + head_offs + offs_kv[None, :] * BLOCK_D + offs_d[:, None], kv_mask[None, :]
        )
        scores = tl.dot(q_tile, k_tile) * scale
        scores = tl.where(offs_kv[None, :] <= offs_m[:, None], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        p = tl.exp2(scores - new_max[:, None])
        alpha = tl.exp2(row_max - new_max)
        row_sum = row_sum * alpha + tl.sum(p, 1)
        v_tile = tl.load(
            v + head_offs + offs_kv[:, None] * BLOCK_D + offs_d[None, :],
            (offs_kv < seq_len)[:, None],
        )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
        row_max = new_max
    out = acc / row_sum[:, None]
    tl.store(y + offs, out.to(y.dtype.element_ty), (offs_m < seq_len)[:, None])


def tutorial_launches() -> dict[str, tuple[Launch, KernelConfig]]:
    """Return a launch of each at the shape of our representative call, and its configuration."""
    make = ExampleInputs()
    x, weight, y = make(8192, 4096), make(4096, 4096), make(8192, 4096)
    heads = [make(32, 8192, 128) for _ in range(4)]
    sizes = (8192, 4096, 4096, 4096, 4096, 4096)
    return {
        "tutorial 03, matmul": (
            _launch("tutorial_matmul", _matmul, (x, weight, y, *sizes), GROUP_M=_GROUP_M),
            KernelConfig.of(8, 3, BLOCK_M=128, BLOCK_N=256, BLOCK_K=64),
        ),
        "tutorial 06, attention": (
            _launch("tutorial_attention", _flash_attention, (*heads, 8192, 0.1), BLOCK_D=128),
            KernelConfig.of(8, 3, BLOCK_M=128, BLOCK_KV=128),
        ),
    }


def _launch(name: str, function: Any, args: tuple[Any, ...], **constants: int) -> Launch:
    kernel = Kernel(
        name=name,
        function=function,
        space=lambda *_, **__: iter(()),
        bound_by="tensor cores",
        scalar_loads=0,
        config_keys=None,
    )
    return Launch(kernel, (), args, constants)
