"""`embedding` on GPUs: a gather of rows; its gradient sums the rows of equal tokens.

The tokens are sorted first, so that one program computes each row of the gradient, in the order of
the tokens: there are no atomics, and the result is deterministic. A very frequent token makes its
program slow. A token outside the table gives a row of zeros: a kernel cannot raise an error.
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
from ingot.kernels.triton.kernel import elementwise_space, kernel
from ingot.kernels.triton.launch import KernelConfig
from ingot.kernels.triton.provider import ExampleInputs, as_rows, provide
from ingot.kernels.triton.target import TargetSpec


def _space(target: TargetSpec, BLOCK_D: int, **_: object) -> Iterator[KernelConfig]:
    yield from elementwise_space(target, BLOCK_D)


@kernel(space=_space, bound_by="bandwidth", scalar_loads=1)
@triton.jit
def _embedding(tokens, weight, y, vocab_size, D, stride_wv, stride_wd, BLOCK_D: tl.constexpr):
    """Copy a block of a token's row."""
    position = tl.program_id(0).to(tl.int64)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token = tl.load(tokens + position).to(tl.int64)
    bound_d = tl.where((token >= 0) & (token < vocab_size), D, 0)
    ptrs = weight + token * stride_wv + offs_d * stride_wd
    values = tl.load(ptrs, offs_d < bound_d, other=0.0)
    tl.store(y + position * D + offs_d, values, offs_d < D)


@kernel(space=_space, bound_by="bandwidth", scalar_loads=4)
@triton.jit
def _embedding_backward(
    tokens, order, grad_output, grad_weight, vocab_size, D, stride_gt, BLOCK_D: tl.constexpr
):
    """Sum a block of the rows in the run of equal tokens that starts at this program's position.

    The sorted tokens end with -1, which ends the last run.
    """
    position = tl.program_id(0)
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    token = tl.load(tokens + position).to(tl.int64)
    previous = tl.load(tokens + tl.maximum(position - 1, 0)).to(tl.int64)
    starts_run = (position == 0) | (token != previous)
    if starts_run & (token >= 0) & (token < vocab_size):
        acc = tl.zeros([BLOCK_D], tl.float32)
        next_token = token
        while next_token == token:
            row = tl.load(order + position).to(tl.int64)
            acc += tl.load(grad_output + row * stride_gt + offs_d, offs_d < D, other=0.0).to(
                tl.float32
            )
            position += 1
            next_token = tl.load(tokens + position).to(tl.int64)
        ptrs = grad_weight + token * D + offs_d
        tl.store(ptrs, acc.to(grad_weight.dtype.element_ty), offs_d < D)


def _block_d(width: int) -> int:
    return min(2048, triton.next_power_of_2(width))


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Launch one kernel."""
    vocab_size, D = weight.shape
    y = weight.new_empty((*tokens.shape, D))
    block_d = _block_d(D)
    _embedding.launch(
        (tokens.numel(), triton.cdiv(D, block_d)),
        *(tokens.contiguous(), weight, y, vocab_size, D, *weight.stride()),
        BLOCK_D=block_d,
    )
    return y


def _backward(
    needs: list[bool], grads: list[Tensor], tokens: Tensor, weight: Tensor
) -> list[Tensor | None]:
    vocab_size, D = weight.shape
    grad_weight = weight.new_zeros(weight.shape)
    grad_output = as_rows(grads[0])
    sorted_tokens, order = tokens.flatten().sort(stable=True)
    block_d = _block_d(D)
    _embedding_backward.launch(
        (tokens.numel(), triton.cdiv(D, block_d)),
        *(
            torch.cat((sorted_tokens, sorted_tokens.new_full((1,), -1))),
            order,
            grad_output,
            grad_weight,
        ),
        *(vocab_size, D, grad_output.stride(0)),
        BLOCK_D=block_d,
    )
    return [None, grad_weight]


def _supported(tokens: Tensor, weight: Tensor) -> bool:
    return tokens.numel() > 0 and weight.numel() > 0 and tokens.dtype != torch.uint8


def _example(make: ExampleInputs) -> tuple[Any, ...]:
    return make.ints(8192, below=131072), make(131072, 4096)


provide(ops.embedding, embedding, example=_example, supports=_supported, backward=_backward)
