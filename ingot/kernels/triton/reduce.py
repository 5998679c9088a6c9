"""Column sums of a matrix, for the gradients of parameters that all rows share.

Two passes: up to `MAX_PARTIALS` programs each sum every n-th block of rows, then one program per
column block sums the partial results. The number of partial sums depends only on the number of
rows, never on the GPU, so the bits do not depend on the GPU either.
"""

# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false
from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from ingot.kernels.triton.kernel import kernel
from ingot.kernels.triton.launch import KernelConfig
from ingot.kernels.triton.target import TargetSpec

MAX_PARTIALS = 256
_BLOCK_M = 16


def _space(target: TargetSpec, **_: object) -> Iterator[KernelConfig]:
    for num_warps in (4, 8, 2):
        yield KernelConfig.of(num_warps)


@kernel(space=_space, bound_by="bandwidth")
@triton.jit
def _sum_rows(x, out, M, N, stride_xm, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum every n-th block of rows, for n programs along axis 1; each writes a row of `out`."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    partial = tl.program_id(1)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start_m in range(partial * BLOCK_M, M, tl.num_programs(1) * BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        offs = offs_m[:, None].to(tl.int64) * stride_xm + offs_n[None, :]
        acc += tl.load(x + offs, mask, other=0.0).to(tl.float32)
    sums = tl.sum(acc, 0)
    tl.store(out + partial * N + offs_n, sums.to(out.dtype.element_ty), offs_n < N)


def sum_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the rows of x (M, N) in float32 and round once to `dtype`."""
    M, N = x.shape
    num_partials = min(MAX_PARTIALS, triton.cdiv(M, _BLOCK_M))
    if num_partials > 1:
        partials = x.new_empty((num_partials, N), dtype=torch.float32)
        _launch(x, partials, num_partials)
        x = partials
    out = x.new_empty((1, N), dtype=dtype)
    _launch(x, out, 1)
    return out[0]


def _launch(x: Tensor, out: Tensor, num_partials: int) -> None:
    M, N = x.shape
    block_n = min(256, triton.next_power_of_2(N))
    grid = (triton.cdiv(N, block_n), num_partials)
    _sum_rows.launch(grid, x, out, M, N, x.stride(0), BLOCK_M=_BLOCK_M, BLOCK_N=block_n)
